#!/usr/bin/env bash
# What of the evidence the calibrations that ship keep, of prompts that chose nothing: about 12 CPU s a 2K document of
# Qwen, and 2 a shape more of it. DATA: the folder of texts (experiments/real/evidence_prompts.py). TARGET, QWEN,
# SMOLLM2: folders of models. OUT: for rows; a second call goes on after those that it holds.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${DATA:?}" "${TARGET:?}" "${QWEN:?}" "${SMOLLM2:?}" "${OUT:?}"
export OMP_NUM_THREADS=1
measure() { # draft, name of its calibration, name of the result, tokens, options
  .venv/bin/python -m experiments.real.evidence --data "$DATA" --target "$TARGET" --draft "$1" --num-tokens "$4" \
    --calibration "spec_stack/assets/calibrations/$2.json" --rows "$OUT/$3.jsonl" \
    --out "experiments/results/evidence_calibrated_$3.json" "${@:5}"
}
measure "$QWEN" qwen2.5-coder-0.5b qwen_shapes_2k 2048 --shapes
measure "$QWEN" qwen2.5-coder-0.5b qwen_shapes_4k 4096 --shapes --documents 8
measure "$QWEN" qwen2.5-coder-0.5b qwen_2k 2048 --per-kind 9
measure "$QWEN" qwen2.5-coder-0.5b qwen_4k 4096 --per-kind 3
measure "$QWEN" qwen2.5-coder-0.5b qwen_8k 8192 --per-kind 2
for questions in musique hotpotqa 2wikimultihopqa; do
  measure "$QWEN" qwen2.5-coder-0.5b "$questions" 2048 --multi-hop "$DATA/multihop/$questions.jsonl" --limit 40
done
measure "$SMOLLM2" smollm2-135m smollm2_shapes_2k 2048 --shapes
measure "$SMOLLM2" smollm2-135m smollm2_2k 2048 --per-kind 5
