#!/usr/bin/env bash
# What of the evidence each rule keeps of the judging prompts: fetches the texts, then about 8 CPU s a prompt of 2K.
# TARGET, QWEN: folders of models. OUT: for texts and rows; a second call goes on after those that it holds.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${TARGET:?}" "${QWEN:?}" "${OUT:?}"
export OMP_NUM_THREADS=1
[ -f "$OUT/texts/texts.jsonl" ] || .venv/bin/python -m experiments.real.fetch_texts "$OUT/texts"
.venv/bin/python -m experiments.real.selection --texts "$OUT/texts" --target "$TARGET" --draft "$QWEN" \
  --calibration spec_stack/assets/calibrations/qwen2.5-coder-0.5b.json \
  --rows "$OUT/selection.jsonl" --out experiments/results/selection.json
.venv/bin/python -m experiments.real.selection --texts "$OUT/texts" --target "$TARGET" --draft "$QWEN" --without-draft \
  --rows "$OUT/bm25.jsonl" --out experiments/results/selection_bm25.json
