#!/usr/bin/env bash
# The same with a pretrained pair in fp32, for processors without bf16 instructions, and with every arm; on modules that
# chose nothing about the rule: decode_collapse_real_fp32.sh TARGET DRAFT ROWS.jsonl FOLDER [options]. An hour and a half of a
# core; a run cut short goes on after its rows, and FOLDER keeps the targets' caches.
set -euo pipefail
target=${1:?usage: decode_collapse_real_fp32.sh TARGET DRAFT ROWS.jsonl FOLDER [options]}
draft=${2:?the draft} rows=${3:?a .jsonl file} folder=${4:?a folder}
cd "$(dirname "$0")/../.."
run() {
    OMP_NUM_THREADS=1 .venv/bin/python -m experiments.speed.decode_collapse --target "$target" --draft "$draft" \
        --rows "$rows" --prefilled "$folder" --precision fp32 --draft-precision fp32 --threads 1 --cpu-seconds --first 1 \
        --prompts 2 --max-tokens 64 --ttft-repeats 0 "$@"
}
every=(plain full window words attention chosen)
run --lengths 1000 4000 --warm-up 0 --policies fixed --arms "${every[@]}"
run --lengths 8000 --kinds "go on" --warm-up 0 --policies fixed --arms "${every[@]}"
run --lengths 1000 4000 --warm-up 16 --policies default --arms plain full chosen
run --lengths 8000 --kinds "go on" --warm-up 16 --policies default --arms plain full chosen
run --lengths 1000 4000 8000 --arms "${every[@]}" --minutes 0 --out experiments/results/decode_collapse_real_fp32.json "${@:5}"
