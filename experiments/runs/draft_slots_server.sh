#!/usr/bin/env bash
# Beside a dense target on a server: no draft, SGLang's own STANDALONE, a draft of the whole prompt, and one over its own
# slots, on documents of 1K to 8K, one and four at once. On the embedded pair about 20 minutes of 2 cores with nothing else
# running; see bench_serving.sh for the environment. On a GPU, with models of real sizes:
#   experiments/runs/draft_slots_server.sh --device cuda --target TARGET --draft DRAFT --server-args '--mem-fraction-static 0.8'
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv-serving/bin/python}
"$PYTHON" -m experiments.serving.traffic --parts lengths --arms off STANDALONE dense slots \
    --out experiments/results/draft_slots_server.json "$@"
