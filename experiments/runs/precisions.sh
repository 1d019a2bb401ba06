#!/usr/bin/env bash
# SpecKV's table of a real pair, from texts that `record_texts.sh … --precision int8` (bf16, nf4) recorded: seconds.
set -euo pipefail
cd "$(dirname "$0")/../.."
results=experiments/results
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.policies.precisions \
    bf16=$results/texts_qwen_bf16.jsonl int8=$results/texts_qwen_int8.jsonl nf4=$results/texts_qwen_nf4.jsonl "$@"
