#!/usr/bin/env bash
# A target's answers over what rules kept, at original and contiguous positions, resumable: real_answers.sh DATA TARGET DRAFT ROWS.jsonl
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.answers --data "$1" --target "$2" --draft "$3" --rows "$4" "${@:5}"
