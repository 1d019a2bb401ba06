#!/usr/bin/env bash
# Profile the embedded pair at every precision, one thread, nothing else running: under 10 minutes, most of it
# recording (24 prompts, 4 precisions, 6 gammas and 2 random runs, 80 tokens each). Interrupted while recording, it goes on
# where it stopped. Leaves profile.parquet (records), profile.json (settings and differing runs), a .json per step (its
# last line) and the predictor that the embedded pair's `speckv` uses (spec_stack/assets/draft/spec_stack_predictor.json).
#     profile_grid.sh [RESULTS_FOLDER [DRAFT_FOLDER]]
# PRECISIONS=fp32 leaves out the others: without AVX-512 bf16 and nf4 take many times longer.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
python=.venv/bin/python
out=${1:-experiments/results}
ship=${2:-spec_stack/assets/draft}
mkdir -p "$out"
read -ra precisions <<<"${PRECISIONS:-fp32 bf16 int8 nf4}"

# Run a script, show what it prints, keep its last line.
keep() {
    "$python" -m "experiments.$2" "${@:3}" | tee /dev/stderr | tail -n 1 >"$out/$1.json.unfinished"
    mv "$out/$1.json.unfinished" "$out/$1.json"
}

keep profile_steps policies.profile_steps --precisions "${precisions[@]}" --gammas 0 1 2 4 6 8 --random 2 \
    --per-task 6 --tokens 80 --threads 1 --out "$out/profile.parquet"
keep block_rounding exactness.block_rounding --precisions "${precisions[@]}" --threads 1
keep profile_training policies.train_controller "$out/profile.parquet" --policies random --out "${TMPDIR:-/tmp}/predictors" --ship "$ship"
keep profile_replay policies.evaluate_policies "$out/profile.parquet"
