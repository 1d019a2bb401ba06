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
    --out "experiments/results/evidence_$3.json" "${@:5}"
}
SHAPES=(--shapes --per-shape 1)
measure "$QWEN" qwen2.5-coder-0.5b shapes_qwen_2k 2048 "${SHAPES[@]}" --documents 12 --seed 313
measure "$QWEN" qwen2.5-coder-0.5b shapes_qwen_4k 4096 "${SHAPES[@]}" --documents 6 --seed 312
for questions in musique hotpotqa 2wikimultihopqa; do
  measure "$QWEN" qwen2.5-coder-0.5b "$questions" 2048 --multi-hop "$DATA/multihop/$questions.jsonl" --limit 30
done
measure "$SMOLLM2" smollm2-135m shapes_smollm2_2k 2048 "${SHAPES[@]}" --documents 12 --seed 313
