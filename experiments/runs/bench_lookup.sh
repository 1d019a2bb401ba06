#!/usr/bin/env bash
# Look-ups beside the draft on the embedded pair; the arguments are the folder that holds the four published prompt files.
set -euo pipefail
data=${1:?usage: bench_lookup.sh DATA_FOLDER [options]}
shift
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.bench_lookup \
    "code=$data/humaneval/HumanEval.jsonl.gz" "math=$data/gsm8k/test.jsonl" \
    "chat=$data/mtbench/question.jsonl" "summary=$data/specbench/question.jsonl:summarization" "$@"
