#!/usr/bin/env bash
# Rules of selection side by side, in words that no tuning saw; about 30 minutes on one thread.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.quality.head_to_head --tokens 2000 4000 8000 --prompts 64 --threads 1 \
  --out experiments/results/head_to_head.json --plot experiments/results/head_to_head.png "$@"
