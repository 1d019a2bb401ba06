#!/usr/bin/env bash
# JSON by a schema on the embedded pair, against plain transformers with the same grammar; one thread, nothing else running.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
.venv/bin/python -m experiments.speed.bench_structured --precision fp32 --prompts 100 --out experiments/results/bench_structured.json "$@"
