#!/usr/bin/env bash
# Decoding speed by length of the context, by what the draft sees, on the embedded pair.
# About half an hour on one thread, nothing else running; with --rows FILE it goes on where it ended.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.decode_collapse --threads 1 --cpu-seconds \
  --out experiments/results/decode_collapse.json "$@"
# README's picture.
.venv/bin/python -m experiments.speed.decode_collapse --redraw experiments/results/decode_collapse.json --plot docs/images/decode_collapse.png
