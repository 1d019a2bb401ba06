#!/usr/bin/env bash
# Decoding behind long documents, the draft over chosen slots and over the whole prompt, resumable:
# real_documents.sh TARGET DRAFT ROWS.jsonl [options]
set -euo pipefail
target=${1:?usage: real_documents.sh TARGET DRAFT ROWS.jsonl [options]} draft=${2:?the draft} rows=${3:?a .jsonl file}
shift 3
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.decode --documents 1000 4000 8000 --per-task 2 --gamma 4 \
    --arms plain draft fixed whole --target "$target" --draft "$draft" --rows "$rows" "$@"
