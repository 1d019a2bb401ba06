#!/usr/bin/env bash
# A conversation of eight turns that grows by 1,000 tokens a turn, beside a dense target on a server: no draft, SGLang's own
# STANDALONE, a draft of the whole text, and one over its own slots. On the embedded pair ten minutes of two cores; see
# bench_serving.sh for the environment.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv-serving/bin/python}
"$PYTHON" -m experiments.serving.traffic --parts growing --arms off STANDALONE dense slots --turns 8 \
    --out experiments/results/growing_server.json "$@"
