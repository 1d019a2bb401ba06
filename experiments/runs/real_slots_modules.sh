#!/usr/bin/env bash
# How many slots a real draft wants, on a pretrained target's own answers to modules that chose nothing about them:
# real_slots_modules.sh TARGET DRAFT COLLAPSE_ROWS.jsonl ROWS.jsonl [options]. The target's plain runs first (four minutes of a
# core each in fp32, resumable), then the draft alone, five minutes a prompt.
set -euo pipefail
target=${1:?usage: real_slots_modules.sh TARGET DRAFT COLLAPSE_ROWS.jsonl ROWS.jsonl [options]}
draft=${2:?the draft} plain=${3:?a .jsonl file} rows=${4:?a .jsonl file}
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.decode_collapse --target "$target" --draft "$draft" --rows "$plain" \
  --precision fp32 --draft-precision fp32 --threads 1 --cpu-seconds --lengths 4000 --first 1 --prompts 2 --max-tokens 96 \
  --ttft-repeats 0 --arms plain --policies fixed
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.slots --draft "$draft" --precision fp32 --collapse "$plain" --max-tokens 96 \
  --slots 256 1024 --limit 3 --rows "$rows" --out experiments/results/real_slots_modules.json "${@:5}"
