#!/usr/bin/env bash
# Seconds of steps at a real pair's sizes, random weights, to 128K tokens: decode_shapes.sh FULL CHOSEN, the tokens a
# step that a draft over the whole prompt and one over chosen slots make (decode_collapse_real.sh measures them).
# About five minutes on one core with nothing else running.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.decode_collapse --no-pair --random llama-8b --threads 1 \
  --tokens-per-step "$1" "$2" --out experiments/results/decode_shapes.json \
  --plot docs/images/decode_collapse_shapes.png "${@:3}"
