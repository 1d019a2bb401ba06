#!/usr/bin/env bash
# Policies and proposers on recorded texts; the arguments are the files that record_texts.py wrote, and its options.
set -euo pipefail
: "${1:?usage: simulate_texts.sh TEXTS.jsonl… [--tune OTHERS.jsonl] [options]}"
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.policies.simulate_texts "$@"
