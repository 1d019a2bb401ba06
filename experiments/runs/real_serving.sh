#!/usr/bin/env bash
# A real pair on SGLang servers, turn by turn, beside STANDALONE and no speculation: real_serving.sh TARGET DRAFT ROWS
# About half an hour on two quiet cores and the check; a run that ended goes on after the rows it finds.
# Once before: make .venv-serving/.ready
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv-serving/bin/python}
# Three servers share the machine's memory: room for so many tokens each, and a share of what is left when it starts.
"$PYTHON" -m experiments.serving.real_pair --target "$1" --draft "$2" --rows "$3" --check \
    --server-args '--mem-fraction-static 0.85 --max-total-tokens 12000' "${@:4}"
