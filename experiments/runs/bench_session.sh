#!/usr/bin/env bash
# Follow-up turns about a 5K-token document, an agent's trace of eight turns on the embedded pair, and a longer one on a
# random pair of real shapes; one thread, nothing else running.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
results=experiments/results
.venv/bin/python -m experiments.speed.bench_session --tokens 5200 --turns 5 --conversations 7 --out $results/bench_session.json "$@"
.venv/bin/python -m experiments.speed.bench_session --agent --tokens 3000 --turns 8 --conversations 3 --arms kept sparse session \
  --out $results/bench_session_agent.json "$@"
.venv/bin/python -m experiments.speed.bench_session --random --agent --tokens 3000 --turns 8 --conversations 1 --no-warm-up \
  --arms kept sparse session --max-tokens 16 --out $results/bench_session_random.json "$@"
