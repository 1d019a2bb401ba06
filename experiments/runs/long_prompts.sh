#!/usr/bin/env bash
# Scoring and selection of prompts of 16K to 128K tokens by a draft of random weights; about 8 minutes on one core.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.long_prompts --threads 1 --out experiments/results/long_prompts.json "$@"
