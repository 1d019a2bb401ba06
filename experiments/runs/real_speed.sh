#!/usr/bin/env bash
# Time to first token and of whole answers by prompt length, nothing else running: real_speed.sh TARGET DRAFT ROWS.jsonl
set -euo pipefail
cd "$(dirname "$0")/../.."
.venv/bin/python -m experiments.real.speed --target "$1" --draft "$2" --rows "$3" --precision bf16 \
  --draft-precision bf16 --threads 2 "${@:4}"
