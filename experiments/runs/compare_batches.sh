#!/usr/bin/env bash
# A server's rules for gamma in replay, at batch 1, 4 and 16, on the committed records; nothing is timed, so any machine
# gives the same figures. The last line is experiments/results/compare_batches.json.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 "${PYTHON:-.venv/bin/python}" -m experiments.policies.compare_batches experiments/results/profile.parquet "$@"
