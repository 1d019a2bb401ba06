#!/usr/bin/env bash
# Plain against prepacked linear layers on the embedded pair, one thread, nothing else running.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.bench_prepack --threads 1 "$@"
