#!/usr/bin/env bash
# What `spec-stack doctor --measure` foretells beside what is measured: real_foretell.sh TARGET DRAFT [options]
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=2 .venv/bin/python -m experiments.real.foretell --target "$1" --draft "$2" --precision bf16 \
    --draft-precision bf16 --threads 2 --lengths 1024 3072 --minutes 3 "${@:3}"
