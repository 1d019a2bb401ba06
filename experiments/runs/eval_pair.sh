#!/usr/bin/env bash
# Pairs side by side as the model card shows them, one thread each; about 5 minutes a pair.
#   VALID=CORPUS/valid_mixed.jsonl.xz bash experiments/runs/eval_pair.sh --pair starter=STARTER --pair new=NEW [--card FILE]
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 "${PYTHON:-.venv/bin/python}" -m experiments.pair.evaluate --valid "${VALID:?the held-out records}" \
    --share 0.12 --prompts 12 --tokens 96 --trials 20 --threads 1 "$@"
