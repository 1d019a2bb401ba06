#!/usr/bin/env bash
# A pair's own texts for simulate_texts.sh, about a minute of CPU a prompt; stop it and start it again at will.
set -euo pipefail
data=${1:?usage: record_texts.sh DATA_FOLDER TARGET DRAFT OUT.jsonl [options]}
target=${2:?the target} draft=${3:?the draft} out=${4:?a .jsonl file}
shift 4
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.policies.record_texts \
    "code=$data/humaneval/HumanEval.jsonl.gz" "math=$data/gsm8k/test.jsonl" \
    "chat=$data/mtbench/question.jsonl" "summary=$data/specbench/question.jsonl:summarization" \
    --target "$target" --draft "$draft" --precision bf16 --draft-precision bf16 --out "$out" "$@"
