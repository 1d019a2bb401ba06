#!/usr/bin/env bash
# What a real draft over chosen slots gets right of given answers: real_slots.sh dev.jsonl DRAFT ANSWERS.jsonl ROWS.jsonl
# ANSWERS are the rows that real_quality.sh made. About a minute a prompt on one core; a run goes on after its rows.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.slots "$1" --draft "$2" --answers "$3" --rows "$4" \
    --out experiments/results/real_slots.json "${@:5}"
