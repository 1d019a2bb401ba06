#!/usr/bin/env bash
# What loading a pair takes in memory, and what rows of zeros save in short steps: real_load.sh TARGET DRAFT
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.load --target "$1" --draft "$2" "${@:3}"
