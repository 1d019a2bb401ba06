#!/usr/bin/env bash
# Look-ups over recorded answers against transformers' prompt look-up; the arguments are the texts and those to tune on.
# The verifications are those of a 1.5B in bf16 on one thread of an AMD EPYC core, at 512 cached tokens (CPU seconds).
set -euo pipefail
texts=${1:?usage: lookup_texts.sh TEXTS TUNING_TEXTS [options]}
tune=${2:?usage: lookup_texts.sh TEXTS TUNING_TEXTS [options]}
shift 2
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.lookup_texts "$texts" --tune "$tune" \
    --block-s 1:0.319 8:0.346 12:0.443 16:0.475 24:0.630 32:0.753 64:1.285 "$@"
