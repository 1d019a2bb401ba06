#!/usr/bin/env bash
# Drift of recurrent state under sparse prefill: trains a small hybrid into build/, measures it, draws the figure.
# CORPUS: a folder of .jsonl(.xz) text. One thread takes about ten minutes of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
corpus=${1:?give the corpus folder}
shift
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.quality.state_drift "$corpus" --train 700 --model build/tiny_hybrid \
  --plot experiments/results/state_drift.png "$@"
