#!/usr/bin/env bash
# Whether another client's question about a shared document shows in what is kept for the next one: 50 documents of the
# embedded pair's own prompts. Counts only; a few minutes on 2 cores. Once before:
#   make .venv-serving/.ready
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv-serving/bin/python}
"$PYTHON" -m experiments.serving.tenants --out experiments/results/tenants.json "$@"
