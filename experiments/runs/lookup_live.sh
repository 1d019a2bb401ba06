#!/usr/bin/env bash
# Look-ups live on Spec-Bench beside Transformers' over the same weights: lookup_live.sh DATA_FOLDER ROWS.jsonl [options].
# On the embedded pair five minutes of a core; --target and --draft name another one.
set -euo pipefail
data=${1:?usage: lookup_live.sh DATA_FOLDER ROWS.jsonl [options]} rows=${2:?a .jsonl file}
cd "$(dirname "$0")/../.."
tasks=()
for task in writing roleplay reasoning math coding extraction stem humanities translation summarization qa math_reasoning rag; do
    tasks+=("$task=$data/specbench/question.jsonl:$task")
done
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.decode "${tasks[@]}" --rows "$rows" \
    --arms plain "look-up 10" "look-up 10 by 3-grams" "own look-up" --per-task 10 --tokens 128 --max-prompt-tokens 1024 "${@:3}"
