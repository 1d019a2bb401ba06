#!/usr/bin/env bash
# Decoding speed by length of the context, four ways; under ten minutes on one thread, nothing else running.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.decode_collapse --random llama-8b --threads 1 \
  --out experiments/results/decode_collapse.json --plot docs/images/decode_collapse_shapes.png "$@"
# README's picture: the pair's curves alone.
.venv/bin/python -m experiments.speed.decode_collapse --redraw experiments/results/decode_collapse.json --plot docs/images/decode_collapse.png
