#!/usr/bin/env bash
# What of the evidence the calibration that ships keeps, of prompts that chose nothing: about 12 CPU s a 2K document of
# Qwen, and 2 a shape more of it. TEXTS: the folder of experiments.real.fetch_texts. DATA: one with multihop/, and novels
# and meetings as experiments/real/evidence_prompts.py names them. TARGET, QWEN, SMOLLM2: folders of models. OUT: for
# rows; a second call goes on after those that it holds. Needs WordLlama.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${TEXTS:?}" "${DATA:?}" "${TARGET:?}" "${QWEN:?}" "${SMOLLM2:?}" "${OUT:?}"
export OMP_NUM_THREADS=1
measure() { # folder of texts, draft, name of the result, tokens, options
  .venv/bin/python -m experiments.real.evidence --data "$1" --target "$TARGET" --draft "$2" --num-tokens "$4" \
    --rows "$OUT/$3.jsonl" --out "experiments/results/evidence_$3.json" "${@:5}"
}
CALIBRATED=(--calibration spec_stack/assets/calibrations/qwen2.5-coder-0.5b.json)
SHAPES=(--shapes --per-shape 1)
of_shapes() { # length, tokens, documents, seed, options
  local shapes=("${SHAPES[@]}" --documents "$3" --seed "$4")
  measure "$TEXTS" "$QWEN" "shapes_qwen_$1" "$2" "${CALIBRATED[@]}" "${shapes[@]}" --precision bf16 "${@:5}"
  measure "$TEXTS" "$QWEN" "shapes_draft_free_$1" "$2" "${shapes[@]}" --draft-free --embeddings
}
of_shapes 2k 2048 12 313
of_shapes 4k 4096 6 312
of_shapes 8k 8192 4 333 --draft-window 512
measure "$TEXTS" "$SMOLLM2" shapes_smollm2_2k 2048 "${SHAPES[@]}" --documents 12 --seed 313 --precision bf16
measure "$DATA" "$QWEN" novels_2k 2048 "${CALIBRATED[@]}" "${SHAPES[@]}" --documents 12 --seed 313
for questions in musique hotpotqa 2wikimultihopqa; do
  measure "$DATA" "$QWEN" "$questions" 2048 "${CALIBRATED[@]}" --multi-hop "$DATA/multihop/$questions.jsonl" --limit 30
done
