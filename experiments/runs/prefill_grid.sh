#!/usr/bin/env bash
# Time to first token at four lengths, and peak memory, one thread, nothing else running; about 8 minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.prefill_grid --tokens 2000 4000 8000 15800 --repeats 5 --threads 1 \
  --calibration spec_stack/assets/draft --out experiments/results/prefill_grid.json "$@"
