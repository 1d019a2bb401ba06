#!/usr/bin/env bash
# What a draft over part of a prompt gets right, by how the part is chosen; a quarter of an hour on one thread.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.draft_choice --lengths 1500 2000 4000 8000 --texts 6 \
  --out experiments/results/draft_choice.json "$@"
