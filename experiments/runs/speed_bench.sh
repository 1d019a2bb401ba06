#!/usr/bin/env bash
# A report in the form of SPEED-Bench on the project's own prompts; a file of SPEED-Bench's rows may be given instead.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.speed_bench --per-task 6 --temperatures 0 1 --threads 1 "$@"
