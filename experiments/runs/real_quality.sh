#!/usr/bin/env bash
# LongBench by its own metrics, resumable: real_quality.sh dev.jsonl TARGET DRAFT CALIBRATION ROWS.jsonl
# Summaries need their metric first: pip install '.[longbench]'
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.quality "$1" --target "$2" --draft "$3" --calibration "$4" \
    --rows "$5" --max-tokens 160 "${@:6}"
