#!/usr/bin/env bash
# A real pair on SGLang servers, turn by turn, beside STANDALONE and no speculation: real_serving.sh TARGET DRAFT
# About twenty minutes on two quiet cores. Once before: make .venv-serving/.ready
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv-serving/bin/python}
"$PYTHON" -m experiments.serving.real_pair --target "$1" --draft "$2" --check "${@:3}"
