#!/usr/bin/env bash
# One 3K document, four later questions, 15 conversations on a real pair, resumable, about a minute each on two cores.
set -euo pipefail
target=${1:?usage: session_suite_real.sh TARGET DRAFT ROWS.jsonl [options]} draft=${2:?the draft} rows=${3:?a .jsonl file}
shift 3
cd "$(dirname "$0")/../.."
.venv/bin/python -m experiments.quality.session_suite --target "$target" --draft "$draft" --precision bf16 --draft-precision bf16 \
    --threads 2 --tokens 3000 --turns 5 --conversations 15 --first-seed 31000 --keep-rate 0.1 --rows "$rows" "$@"
