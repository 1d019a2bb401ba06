#!/usr/bin/env bash
# Dense against sparse prefill, the server's scoring attention at new lengths, and decode steps on
# one CUDA card of 80 GB or more, in under 9 minutes. It reaches no network. SGLang's servers on a card: serving_drafters.sh.
# Needs a Python with torch and transformers, nothing installed from here. PYTHON, OUT and COMMIT may be set; further
# arguments go to the script (--shape qwen-32b wants 140 GB).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-experiments/results}
if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "$PYTHON is $("$PYTHON" --version 2>&1), and Python 3.11 or newer is needed; set PYTHON" >&2
    exit 1
fi
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# A cache that grows by copies leaves blocks of every size behind; segments that grow in place can use them again.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
if ! "$PYTHON" -c 'import torch; torch.zeros(1 << 26, device="cuda")' 2>/dev/null; then
    unset PYTORCH_ALLOC_CONF
fi
"$PYTHON" -m experiments.gpu.bench_gpu --device cuda --out "$OUT/bench_gpu.json" ${COMMIT:+--commit "$COMMIT"} "$@"
