#!/usr/bin/env bash
# HumanEval by a target, resumable: real_humaneval.sh TARGET DRAFT HumanEval.jsonl.gz ROWS.jsonl
# First in batches by Transformers alone, then one by one with the draft.
set -euo pipefail
cd "$(dirname "$0")/../.."
for arm in "batched --batch 16" spec; do
    # shellcheck disable=SC2086
    OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.humaneval "$3" --target "$1" --draft "$2" --rows "$4" \
        --precision bf16 --draft-precision bf16 --every 2 --limit 64 --max-tokens 400 --arm $arm "${@:5}"
done
