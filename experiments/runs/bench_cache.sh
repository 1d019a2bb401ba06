#!/usr/bin/env bash
# A KV cache that is copied in every forward against one with room set aside, one thread, nothing else running.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.bench_cache "$@"
