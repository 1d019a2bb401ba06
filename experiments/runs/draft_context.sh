#!/usr/bin/env bash
# Drafting over the full prompt against drafting over the kept slots.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.draft_context --tokens 8000 --prompts 20 --threads 1 "$@"
