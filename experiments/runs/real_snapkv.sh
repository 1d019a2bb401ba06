#!/usr/bin/env bash
# SnapKV on the question-last prompts of real_answers.sh, resumable: real_snapkv.sh PYTHON DATA TARGET ROWS.jsonl
# PYTHON: of an environment with kvpress 0.5.5 and transformers 5.2, which kvpress needs and this package's range excludes.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 "$1" -m experiments.real.snapkv --data "$2" --target "$3" --rows "$4" --seed 331 --documents 16 \
  --limit 104 "${@:5}"
