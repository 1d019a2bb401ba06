#!/usr/bin/env bash
# End the training of a pair on its way (train_pair_tasks.sh): both models at once, one CPU thread each, more text and
# longer documents, while the rate goes to zero. The target keeps its text by TEACHER's choices (the pair that the training
# began with), the draft by the target's of PAIR.
#   CORPUS=CORPUS PAIR=PAIR TEACHER=TARGET RUN=RUN [MINUTES=34] experiments/runs/train_pair_finish.sh
# MINUTES are of a processor, for each model. RUN/pair is the result. SIGTERM ends it with a checkpoint, to go on from.
# Of the embedded pair only the draft is from here: the target unlearned some of what it did at 8,192 tokens, and so is
# the one before (experiments/LOG.md, "The pair's second edition"). RUN/pair/target-mean is the mean of both.
set -euo pipefail
CORPUS=$(realpath "${CORPUS:?a folder of *.jsonl(.xz) files}")
PAIR=$(realpath "${PAIR:?the pair to end}")
TEACHER=$(realpath "${TEACHER:?the target whose text is to be kept}")
RUN=$(realpath -m "${RUN:?the folder for data, checkpoints and the pair}")
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
MINUTES=${MINUTES:-34}
TRAIN=("${PYTHON:-python3}" -m experiments.pair.train)

[ -f "$RUN/data/info.json" ] || "${TRAIN[@]}" prepare --corpus "$CORPUS" --data "$RUN/data" \
    --tokenizer-from "$TEACHER" --exclude cpython-3.13-stdlib

trap 'trap "" INT TERM; kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM

start() {
    "${TRAIN[@]}" train --data "$RUN/data" --threads 1 --out "$RUN/$1" --init "$PAIR/$1" --save-s 300 --average 0.97 \
        --minutes "$MINUTES" --warmup 20 --first-weight 4 --decay-from 0.1 --lr 0.002 --other-lr 2e-4 "${@:2}" &
}
start target --teacher "$TEACHER" --distil 0.5 --copy-weight 0.2 --middle-layer 3 --middle-weight 0.3 \
    --mix wide:0.5:256/384/512:1,wide:0.5:512/768/1024:1,wide:0.5:1024/2048:1,lm:2:512:3
start draft --teacher "$PAIR/target" --distil 0.7 --copy-weight 0.1 --attention-weight 0.3 --windowed 0.5 \
    --mix wide:0.5:256/384/512:1,wide:0.5:512/1024:1,wide:0.5:1024/2048/4096:1,lm:3:512:6
wait -n
wait -n
for name in target draft; do
    "${TRAIN[@]}" export --run "$RUN/$name" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/$name"
done
"${TRAIN[@]}" average --of "$PAIR/target" "$RUN/pair/target" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/target-mean"
