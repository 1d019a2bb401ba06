#!/usr/bin/env bash
# Does anything tell the prompts that pruning hurts, within a kind of task? About 20 minutes on one thread.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.quality.harm_signals --tokens 2000 4000 --prompts 192 --threads 1 \
  --out experiments/results/harm_signals.json "$@"
