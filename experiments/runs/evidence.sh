#!/usr/bin/env bash
# What of the evidence the calibration that ships keeps, of prompts that chose nothing: about 12 CPU s a 2K document of
# Qwen, and 2 a shape more of it. DATA: the folder of texts (experiments/real/evidence_prompts.py). TARGET, QWEN,
# SMOLLM2: folders of models. OUT: for rows; a second call goes on after those that it holds.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${DATA:?}" "${TARGET:?}" "${QWEN:?}" "${SMOLLM2:?}" "${OUT:?}"
export OMP_NUM_THREADS=1
measure() { # draft, name of the result, tokens, options
  .venv/bin/python -m experiments.real.evidence --data "$DATA" --target "$TARGET" --draft "$1" --num-tokens "$3" \
    --rows "$OUT/$2.jsonl" --out "experiments/results/evidence_$2.json" "${@:4}"
}
SHAPES=(--shapes --per-shape 1)
CALIBRATED=(--calibration spec_stack/assets/calibrations/qwen2.5-coder-0.5b.json)
of_shapes() { # length, tokens, documents, seed, options; DATA is that of experiments.real.fetch_texts
  measure "$QWEN" "shapes_qwen_$1" "$2" "${CALIBRATED[@]}" "${SHAPES[@]}" --documents "$3" --seed "$4" --precision bf16 "${@:5}"
  # Needs WordLlama.
  measure "$QWEN" "shapes_draft_free_$1" "$2" --draft-free --embeddings "${SHAPES[@]}" --documents "$3" --seed "$4"
}
of_shapes 2k 2048 12 313
of_shapes 4k 4096 6 312
of_shapes 8k 8192 4 333 --draft-window 512
for questions in musique hotpotqa 2wikimultihopqa; do
  measure "$QWEN" "$questions" 2048 "${CALIBRATED[@]}" --multi-hop "$DATA/multihop/$questions.jsonl" --limit 30
done
measure "$SMOLLM2" shapes_smollm2_2k 2048 "${SHAPES[@]}" --documents 12 --seed 313
