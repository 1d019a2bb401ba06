#!/usr/bin/env bash
# SGLang servers side by side: serving.sh [options], on the embedded pair unless --target and --draft name another one.
# Conversations by default; a draft over its own slots: --parts lengths --arms off STANDALONE dense slots.
# On a CPU once before: make .venv-serving/.ready. That environment has stand-ins for what SGLang lacks there
# (tests/serving/support), so the times show a direction and no figure is SGLang's speed. On a GPU:
#   PYTHON=python serving.sh --device cuda --target TARGET --draft DRAFT --lengths 8192 16384 \
#       --server-args '--mem-fraction-static 0.2'
set -euo pipefail
cd "$(dirname "$0")/../.."
"${PYTHON:-.venv-serving/bin/python}" -m experiments.serving.bench "$@"
