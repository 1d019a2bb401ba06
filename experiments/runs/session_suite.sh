#!/usr/bin/env bash
# Facts dropped by the first question and asked for later, 40 conversations of each family, on the embedded pair.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.quality.session_suite --families codes mixed --conversations 40 --turns 5 --keep-rate 0.05 --settings 8x16x16x1 "$@"
# What comes back, appended or written before the last questions and answers.
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.quality.session_suite --families codes mixed --conversations 40 --first-seed 9000 --no-controls \
  --settings 8x16x16x1 "$@"
