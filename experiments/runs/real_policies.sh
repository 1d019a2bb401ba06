#!/usr/bin/env bash
# Policies live on a real pair, resumable: real_policies.sh DATA_FOLDER TARGET DRAFT ROWS.jsonl [options]. On a quiet
# machine, with precision bf16, int8 or nf4 in PRECISION.
set -euo pipefail
data=${1:?usage: real_policies.sh DATA_FOLDER TARGET DRAFT ROWS.jsonl [options]}
target=${2:?the target} draft=${3:?the draft} rows=${4:?a .jsonl file}
shift 4
cd "$(dirname "$0")/../.."
# The prompts left out trained the network of the default policy.
OMP_NUM_THREADS=1 ${PYTHON:-.venv/bin/python} -m experiments.real.decode \
    "code=$data/humaneval/HumanEval.jsonl.gz" "math=$data/gsm8k/test.jsonl" "chat=$data/mtbench/question.jsonl" \
    "summary=$data/specbench/question.jsonl:summarization" "edit=experiments/prompts/copying.jsonl:edit" \
    --target "$target" --draft "$draft" --precision "${PRECISION:-bf16}" --draft-precision bf16 --rows "$rows" \
    --per-task 4 --leave-out code-0 code-2 math-0 chat-0 summary-0 --tokens 128 \
    --arms plain default draft confidence fixed heuristic ema speckv "assisted 3" "look-up 10" "$@"
