#!/usr/bin/env bash
# Whole answers by prompt and answer length, nothing else running: real_end_to_end.sh TARGET DRAFT ROWS.jsonl
set -euo pipefail
cd "$(dirname "$0")/../.."
.venv/bin/python -m experiments.real.end_to_end --target "$1" --draft "$2" --rows "$3" --precision bf16 \
  --draft-precision bf16 --threads 1 --unit cpu_s "${@:4}"
