#!/usr/bin/env bash
# Signals of the draft against the target's loss: about 40 CPU s a prompt of 2K. DATA: the folder of texts
# (experiments/real/evidence_prompts.py). TEXTS: that of fetch_texts.py. TARGET, DRAFT: folders of models. OUT: for rows.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${DATA:?}" "${TEXTS:?}" "${TARGET:?}" "${DRAFT:?}" "${OUT:?}"
export OMP_NUM_THREADS=1
.venv/bin/python -m experiments.real.checked --data "$DATA" --texts "$TEXTS" --target "$TARGET" --draft "$DRAFT" \
  --calibration spec_stack/assets/calibrations/qwen2.5-coder-0.5b.json --rows "$OUT/checked.jsonl" \
  --out experiments/results/checked.json "$@"
# First tokens, interleaved, where nothing else runs: about 80 s a prompt.
.venv/bin/python -m experiments.real.checked_speed --data "$DATA" --texts "$TEXTS" --target "$TARGET" --draft "$DRAFT" \
  --precision bf16 --draft-precision bf16 --calibration spec_stack/assets/calibrations/qwen2.5-coder-0.5b.json \
  --num-tokens 1900 --from-tokens 1500 --most-tokens 2600 --keep-rates 0.1 0.2 --rows "$OUT/checked_speed.jsonl" \
  --limit 8 --out experiments/results/checked_speed.json
