#!/usr/bin/env bash
# Recorded agents replayed, resumable, on a quiet machine: real_agents.sh SESSIONS.jsonl TARGET DRAFT ROWS.jsonl [options]
set -euo pipefail
sessions=${1:?usage: real_agents.sh SESSIONS.jsonl TARGET DRAFT ROWS.jsonl [options]}
target=${2:?the target} draft=${3:?the draft} rows=${4:?a .jsonl file}
shift 4
cd "$(dirname "$0")/../.."
.venv/bin/python -m experiments.real.agents "$sessions" --target "$target" --draft "$draft" \
    --precision bf16 --draft-precision bf16 --rows "$rows" "$@"
