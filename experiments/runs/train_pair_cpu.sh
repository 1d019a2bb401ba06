#!/usr/bin/env bash
# The embedded pair from nothing on 2 CPU cores: tokenizer, target (6 layers x 256), draft (2 layers x 128) distilled
# from it, both to 8K tokens. They begin side by side, one core each; then the target has both cores, then the draft.
#   CORPUS=CORPUS RUN=RUN bash experiments/runs/train_pair_cpu.sh
# MINUTES=115 is the whole of it, but for two of preparation and validation; RUN/pair is the result. An interrupted run goes on
# from its checkpoints. The standard library's sources are left out of the corpus, because retrieval is tested on them.
set -euo pipefail
CORPUS=$(realpath "${CORPUS:?a folder of *.jsonl(.xz) files}")
RUN=$(realpath -m "${RUN:?the folder for data, checkpoints and the pair}")
cd "$(dirname "$0")/../.."
MINUTES=${MINUTES:-115}
TRAIN=("${PYTHON:-python3}" -m experiments.pair.train)

share() { awk -v all="$MINUTES" -v part="$1" 'BEGIN { print all * part }'; }

[ -f "$RUN/data/info.json" ] || "${TRAIN[@]}" prepare --corpus "$CORPUS" --data "$RUN/data" --vocab 4096 \
    --exclude cpython-3.13-stdlib

# train_target THREADS UNTIL: go on until a share of the time.
train_target() {
    exec env OMP_NUM_THREADS="$1" "${TRAIN[@]}" train --data "$RUN/data" --threads "$1" --shape target --seed-heads \
        --out "$RUN/target" --save-s "$(share 3)" --minutes "$(share 0.74)" --stop-minutes "$(share "$2")" \
        --decay-from 0.5 --lr 0.015 --other-lr 3e-3 --gapped 0.3 --context-weight 1 \
        --mix "0.35=lm:1:256:10,repeat:0.5:256:2" \
        --mix "0.65=lm:1:512:5,repeat:0.2:512:1,task:0.5:512/1024:1" \
        --mix "lm:1:1024:3,task:0.7:2048/4096/8192:1,sparse:0.3:8192:1"
}

# train_draft THREADS UNTIL [TEACHER]: likewise; the draft's own time is 0.625 of the whole.
train_draft() {
    exec env OMP_NUM_THREADS="$1" "${TRAIN[@]}" train --data "$RUN/data" --threads "$1" --shape draft --seed-heads \
        --out "$RUN/draft" --save-s "$(share 3)" --minutes "$(share 0.625)" --stop-minutes "$(share "$2")" \
        ${3:+--teacher "$3"} --attention-weight 0.3 --decay-from 0.6 --lr 0.012 --other-lr 3e-3 \
        --mix "0.3=lm:1:256:12,repeat:0.7:256:4" \
        --mix "0.6=lm:1:512:6,repeat:0.2:512:2,task:0.3:1024/2048:1" \
        --mix "lm:1:1024:4,task:0.5:4096/8192/8192:1"
}

export_target() {
    "${TRAIN[@]}" export --run "$RUN/target" --tokenizer "$RUN/data/tokenizer" --to "$1"
}

trap 'trap "" INT TERM; kill $(jobs -p) 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM
train_target 1 0.365 &
TARGET_JOB=$!
train_draft 1 0.185 &
wait $!
export_target "$RUN/teacher"  # as far as it has come
train_draft 1 0.365 "$RUN/teacher" &
wait $!
wait "$TARGET_JOB"
train_target 2 1 &
wait $!
export_target "$RUN/pair/target"
train_draft 2 1 "$RUN/pair/target" &
wait $!
"${TRAIN[@]}" export --run "$RUN/draft" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/draft"
