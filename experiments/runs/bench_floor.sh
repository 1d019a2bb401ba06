#!/usr/bin/env bash
# The floor on the embedded pair, 20 prompts a case; arguments go to the script.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.policies.bench_floor "$@"
