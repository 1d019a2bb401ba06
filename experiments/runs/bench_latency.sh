#!/usr/bin/env bash
# Time to first token and decoding speed on the embedded pair, one thread, nothing else running.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.bench_latency --tokens 8200 --keep-rate 0.2 --repeats 5 --threads 1 "$@"
