#!/usr/bin/env bash
# Calibration of three drafts: the embedded one, one with another tokenizer, one of random weights; about a minute on one core.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.quality.calibrate_drafts --threads 1 --out experiments/results/calibrate_drafts.json "$@"
