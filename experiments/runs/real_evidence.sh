#!/usr/bin/env bash
# What of the evidence rules keep over captured prompts: real_evidence.sh DATA TARGET CAPTURES CALIBRATION
# The captures are made by experiments.real.captures, which takes a draft: about 12 s of a core for each prompt of 2K.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.real.evidence --data "$1" --target "$2" --captures "$3" \
  --calibration "$4" "${@:5}"
