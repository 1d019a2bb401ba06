#!/usr/bin/env bash
# Follow-up turns about a 5K-token document, then an agent's trace, on the embedded pair; one thread, nothing else running.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
.venv/bin/python -m experiments.speed.bench_session --tokens 5200 --turns 5 --conversations 7 "$@"
.venv/bin/python -m experiments.speed.bench_session --agent --tokens 3000 --turns 5 --conversations 3 --arms kept sparse session "$@"
