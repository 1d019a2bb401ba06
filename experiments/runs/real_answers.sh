#!/usr/bin/env bash
# A target's answers over what rules kept of captured prompts, resumable: real_answers.sh DATA TARGET CAPTURES ROWS.jsonl
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.answers --data "$1" --target "$2" --captures "$3" --rows "$4" "${@:5}"
