#!/usr/bin/env bash
# What each way of choosing keeps of the evidence, in words that no tuning saw; about 20 minutes on one thread.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.quality.selection_suite --tokens 2000 4000 8000 15000 --prompts 64 --answers \
  --calibration spec_stack/assets/draft --threads 1 --out experiments/results/selection_suite.json "$@"
