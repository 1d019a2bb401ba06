#!/usr/bin/env bash
# The weights of the default policy's survival model, from texts that record_texts.sh recorded.
set -euo pipefail
: "${1:?usage: train_survival.sh TEXTS.jsonl… [options]}"
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.policies.train_survival "$@" --out spec_stack/assets/survival.json
