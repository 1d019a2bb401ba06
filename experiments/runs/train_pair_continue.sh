#!/usr/bin/env bash
# Long-context retrieval for an existing pair: continue both models of PAIR on sequences of up to 8K tokens.
#   CORPUS=CORPUS PAIR=PAIR RUN=RUN bash experiments/runs/train_pair_continue.sh
# PAIR has target/ and draft/ (Transformers folders); the result is RUN/pair. Both models train at once, on one thread
# each. What was run was ended by the clock; here the stages end at the steps that were reached then.
# The standard library's sources are left out of the corpus, because retrieval is tested on them.
set -euo pipefail
CORPUS=$(realpath "${CORPUS:?a folder of *.jsonl(.xz) files}")
PAIR=$(realpath "${PAIR:?the pair to continue}")
RUN=$(realpath -m "${RUN:?the folder for data, checkpoints and the pair}")
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
TRAIN=("${PYTHON:-python3}" -m experiments.pair.train)
COMMON=(--data "$RUN/data" --threads 1)

[ -f "$RUN/data/info.json" ] || "${TRAIN[@]}" prepare --corpus "$CORPUS" --data "$RUN/data" \
    --tokenizer-from "$PAIR/target" --exclude cpython-3.13-stdlib

train() {  # in the background, so that a signal is not kept waiting
    "${TRAIN[@]}" train "$@" &
    wait $!
}

stop_with_me() {
    trap 'trap "" INT TERM; kill $(jobs -p) 2>/dev/null || true' EXIT
    trap 'exit 130' INT TERM
}

continue_target() {
    stop_with_me
    local both=("${COMMON[@]}" --init "$PAIR/target" --out "$RUN/target" --warmup 20)
    # Retrieval first, at a constant rate: 8K answers are right after these 65 steps, held-out text is 3 % worse.
    train "${both[@]}" --mix "task:1:4096/8192/8192:1,sparse:0.5:8192:1,lm:1:2048:2" \
        --steps 65 --decay-from 1 --lr 0.004 --other-lr 6e-4
    # Then mostly text, partly distilled from the model as it was, while the rate goes to zero.
    train "${both[@]}" --mix "task:0.3:2048/4096/4096/8192:1,sparse:0.3:8192:1,lm:2:1024:6" \
        --teacher "$PAIR/target" --distil 0.5 --steps 251 --decay-from 0.27 --lr 0.002 --other-lr 3e-4
    "${TRAIN[@]}" export --run "$RUN/target" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/target"
}

continue_draft() {
    local both=("${COMMON[@]}" --init "$PAIR/draft" --out "$RUN/draft" --warmup 30 --attention-weight 0.3)
    # Retrieval first: the facts of 8K prompts are kept after these 93 steps, held-out text is 7 % worse.
    train "${both[@]}" --teacher "$PAIR/target" --mix "task:1:2048/4096:1,task:1:4096:1,lm:1:2048:2" \
        --steps 93 --decay-from 1 --lr 0.006 --other-lr 1e-3
    # Then mostly text; --steps fixes the decay, so the change of teacher is a stop within it.
    local text=(--mix task:0.5:4096/8192/8192:1,lm:2:1024:4,lm:1:4096:1 --lr 0.004 --other-lr 5e-4)
    train "${both[@]}" "${text[@]}" --teacher "$PAIR/target" --steps 584 --decay-from 0.2 --stop-at 383
    wait "$TARGET_JOB"  # what was run took the target as it was after 133 steps, when both trained at once
    train "${both[@]}" "${text[@]}" --teacher "$RUN/pair/target" --steps 584 --decay-from 0.2
    "${TRAIN[@]}" export --run "$RUN/draft" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/draft"
}

stop_with_me
continue_target &
TARGET_JOB=$!
continue_draft
