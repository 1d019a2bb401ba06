#!/usr/bin/env bash
# Greedy text of pretrained weights against Transformers': pretrained.sh TARGET DRAFT OUT_PREFIX, in fp32 and bf16
set -euo pipefail
cd "$(dirname "$0")/../.."
for precision in fp32 bf16; do
    OMP_NUM_THREADS=1 .venv/bin/python -m experiments.exactness.pretrained --target "$1" --draft "$2" \
        --precision "$precision" --draft-precision "$precision" --max-tokens 24 --longest 800 --out "$3_$precision.json" "${@:4}"
done
