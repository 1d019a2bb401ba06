#!/usr/bin/env bash
# Hidden facts kept and answered, and drafted tokens accepted, with a draft of the same and of other tokenizers.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.quality.cross_tokenizer --threads 1 "$@"
