#!/usr/bin/env bash
# Does anything tell the prompts that pruning hurts, within a kind of task, and what would a floor by it gain? Directions
# and lines are learned on the wordings for tuning and judged on the others; about 20 minutes on one thread.
# Options go to both runs, so neither --out, --half nor --seed belongs here.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
results=experiments/results
.venv/bin/python -m experiments.quality.harm_signals --tokens 2000 4000 --prompts 96 --threads 1 --half tuning --seed 20 \
  --out $results/harm_signals_tuning.json "$@"
.venv/bin/python -m experiments.quality.harm_signals --tokens 2000 4000 --prompts 96 --threads 1 --seed 23 \
  --learn-from $results/harm_signals_tuning.json --out $results/harm_signals.json "$@"
