#!/usr/bin/env bash
# The same with a pretrained pair, the draft over all of the prompt or over chosen slots: decode_collapse_real.sh TARGET
# DRAFT ROWS.jsonl [options]. About three quarters of an hour on one core; a run cut short goes on after its rows.
set -euo pipefail
target=${1:?usage: decode_collapse_real.sh TARGET DRAFT ROWS.jsonl [options]}
draft=${2:?usage: decode_collapse_real.sh TARGET DRAFT ROWS.jsonl [options]}
rows=${3:?usage: decode_collapse_real.sh TARGET DRAFT ROWS.jsonl [options]}
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.decode_collapse --target "$target" --draft "$draft" \
  --rows "$rows" --precision bf16 --draft-precision bf16 --threads 1 --cpu-seconds --lengths 2000 4000 8000 \
  --prompts 1 --max-tokens 96 --ttft-repeats 1 --arms plain full chosen \
  --out experiments/results/decode_collapse_real.json "${@:4}"
