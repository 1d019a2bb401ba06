#!/usr/bin/env bash
# The QPS experiment on the embedded pair: SGLang without speculation, with STANDALONE, with SPEC_STACK that prunes
# nothing and with SPEC_STACK, in turn, at rising request rates: single requests, then conversations. Meant to take less
# than 12 minutes on 2 cores with nothing else running; it stops by itself. Once before:
#   make .venv-serving/.ready
# That environment has stand-ins for what SGLang lacks on a CPU
# (tests/serving/support): index kernels in Python, attention by torch. Torch's prefill is slow and quadratic there: the
# ratios between modes show a direction, and no figure is SGLang's speed. On a GPU, without the stand-ins:
#   python -m experiments.serving.bench_serving --target TARGET --draft DRAFT --device cuda --tokens 8192 16384 \
#       --rates 1 2 3 4 6 8 12 16 24 --timeout 10 --seconds 60 --server-args '--mem-fraction-static 0.8'
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv-serving/bin/python}
"$PYTHON" -m experiments.serving.bench_serving --device cpu --rounds 1 --timeout 5 --seconds 12 "$@"
