#!/usr/bin/env bash
# A 1B/3B pair on one CUDA card at fp16, int8 and nf4: acceptance and times at every fixed gamma, then the policies in replay
# of these records. Not measured yet: under 25 minutes are expected on a card of 24 GB or more, most of it recording.
# TARGET, DRAFT, PRECISIONS, PYTHON, OUT and DEVICE may be set; an interrupted recording goes on where it stopped.
#     profile_grid_gpu.sh                  the pair below, which has to be on this machine
#     SMALL=1 DEVICE=cpu PRECISIONS="fp32 int8" TARGET= DRAFT= profile_grid_gpu.sh    a dry run with the embedded pair
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-experiments/results}
TARGET=${TARGET-meta-llama/Llama-3.2-3B-Instruct}
DRAFT=${DRAFT-meta-llama/Llama-3.2-1B-Instruct}
read -ra precisions <<<"${PRECISIONS:-fp16 int8 nf4}"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
models=(--device "${DEVICE:-cuda}")
if [ -n "$TARGET" ]; then models+=(--target "$TARGET" --draft "$DRAFT" --draft-precision fp16); fi
profile=(--gammas 0 2 4 6 8 --random 2 --per-task 6 --tokens 96)
if [ -n "${SMALL:-}" ]; then
    profile=(--gammas 0 2 --random 1 --per-task 2 --tokens 28)
fi
mkdir -p "$OUT"

# Run a script, show what it prints, keep its last line.
keep() {
    "$PYTHON" -m "experiments.$2" "${@:3}" | tee /dev/stderr | tail -n 1 >"$OUT/$1.json.unfinished"
    mv "$OUT/$1.json.unfinished" "$OUT/$1.json"
}

keep profile_steps_gpu policies.profile_steps "${models[@]}" --precisions "${precisions[@]}" "${profile[@]}" \
    --out "$OUT/profile_gpu.parquet"
keep profile_replay_gpu policies.evaluate_policies "$OUT/profile_gpu.parquet"
