#!/usr/bin/env bash
# What of the evidence the calibrations that ship keep, of prompts that chose nothing; captures take about 12 CPU s a prompt.
# DATA: the folder of texts (experiments/real/evidence_prompts.py). TARGET, QWEN, SMOLLM2: folders of models. OUT: for captures.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${DATA:?}" "${TARGET:?}" "${QWEN:?}" "${SMOLLM2:?}" "${OUT:?}"
export OMP_NUM_THREADS=1
# Options of each of the two scripts; the heads were chosen by hand on other documents and wordings.
captured=() judged=(--heads 13.0,13.13,14.9,15.9,15.12,16.6,16.7,15.7)
measure() { # draft, name of its calibration, name of the result, tokens, prompts of each kind, options of both scripts
  common=(--data "$DATA" --target "$TARGET" --num-tokens "$4" --per-kind "$5" "${@:6}")
  .venv/bin/python -m experiments.real.captures "${common[@]}" "${captured[@]}" --draft "$1" --out "$OUT/$3"
  .venv/bin/python -m experiments.real.evidence "${common[@]}" "${judged[@]}" --captures "$OUT/$3" \
    --calibration "spec_stack/assets/calibrations/$2.json" --out "experiments/results/evidence_calibrated_$3.json"
}
measure "$QWEN" qwen2.5-coder-0.5b qwen_2k 2048 9
measure "$QWEN" qwen2.5-coder-0.5b qwen_4k 4096 3
measure "$QWEN" qwen2.5-coder-0.5b qwen_8k 8192 2
measure "$QWEN" qwen2.5-coder-0.5b qmsum 2048 9 --qmsum
captured=(--window 512)
measure "$QWEN" qwen2.5-coder-0.5b qwen_8k_window_512 8192 2
judged=(--only calibrated)
measure "$QWEN" qwen2.5-coder-0.5b qwen_4k_window_512 4096 3
captured=(--window 1024)
measure "$QWEN" qwen2.5-coder-0.5b qwen_4k_window_1024 4096 3
captured=() judged=()
measure "$SMOLLM2" smollm2-135m smollm2_2k 2048 5
