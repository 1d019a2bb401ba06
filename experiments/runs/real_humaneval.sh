#!/usr/bin/env bash
# HumanEval by a target, resumable: real_humaneval.sh TARGET DRAFT HumanEval.jsonl.gz ROWS.jsonl
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.humaneval "$3" --target "$1" --draft "$2" --rows "$4" \
    --precision bf16 --every 2 --limit 64 --arms batched --batch 16 --max-tokens 400 "${@:5}"
