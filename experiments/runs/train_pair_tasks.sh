#!/usr/bin/env bash
# Teach the pair in PAIR to answer questions in many wordings (experiments/pair/wording.py), on one CPU thread: the target
# first, then the draft, distilled from it. Both go on from PAIR and keep their shapes, but for wider MLPs in the draft.
#   CORPUS=CORPUS PAIR=spec_stack/assets RUN=RUN bash experiments/runs/train_pair_tasks.sh
# MINUTES=480 is the whole of it in processor minutes, so that a run that is stopped, or shares its core, loses nothing. An
# interrupted run (SIGTERM ends it with a checkpoint) goes on when it is started again. RUN/pid holds the process that trains.
# UNTIL=0.5 ends both models at that share of their time, so that a part of the run already gives a pair; RUN/pair is it.
set -euo pipefail
CORPUS=$(realpath "${CORPUS:?a folder of *.jsonl(.xz) files}")
PAIR=$(realpath "${PAIR:?the pair to continue}")
RUN=$(realpath -m "${RUN:?the folder for data, checkpoints and the pair}")
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
MINUTES=${MINUTES:-480}
UNTIL=${UNTIL:-1}
TRAIN=("${PYTHON:-python3}" -m experiments.pair.train)

minutes() { awk -v all="$MINUTES" -v part="$1" -v until="$2" 'BEGIN { print all * part * until }'; }

[ -f "$RUN/data/info.json" ] || "${TRAIN[@]}" prepare --corpus "$CORPUS" --data "$RUN/data" \
    --tokenizer-from "$PAIR/target" --exclude cpython-3.13-stdlib

# train NAME SHARE ARGUMENTS…: in the background, so that a signal is not kept waiting.
train() {
    "${TRAIN[@]}" train --data "$RUN/data" --threads 1 --out "$RUN/$1" --init "$PAIR/$1" --save-s 180 --average 0.995 \
        --minutes "$(minutes "$2" 1)" --stop-minutes "$(minutes "$2" "$UNTIL")" "${@:3}" &
    echo $! >"$RUN/pid"
    wait $!
    "${TRAIN[@]}" export --run "$RUN/$1" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/$1"
}

trap 'trap "" INT TERM; kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM

# A great many short documents first, since a question costs its document; then longer ones, then the long ones with text,
# while the rate goes to zero. Held-out text is kept by the old target's own choices (--teacher).
SHORT=wide:0.5:384/512/512/768:1
MIDDLE=wide:0.5:768/1024/2048:1
train target 0.6 --teacher "$PAIR/target" --distil 0.5 --lr 0.006 --other-lr 3e-4 --warmup 40 --copy-weight 0.2 \
    --decay-from 0.4 \
    --mix "0.45=$SHORT,$SHORT,$SHORT,$SHORT,wide-sparse:0.3:2048:1,lm:1.5:512:2" \
    --mix "0.75=$SHORT,$SHORT,$MIDDLE,$MIDDLE,wide-sparse:0.3:4096:1,lm:2:1024:2" \
    --mix "$SHORT,$MIDDLE,wide:0.5:4096/8192:1,wide-sparse:0.3:8192:1,lm:3:1024:3"

# Half of the documents are read with a window of 128 and 64 sinks; the attention of the last layer to the evidence is part of
# the loss, because it chooses what sparse prefill keeps.
train draft 0.4 --teacher "$RUN/pair/target" --distil 0.7 --lr 0.006 --other-lr 5e-4 --warmup 40 --widen-mlp 384 \
    --attention-weight 0.3 --copy-weight 0.1 --windowed 0.5 --decay-from 0.4 \
    --mix "0.35=$SHORT,$SHORT,$SHORT,$SHORT,lm:1.5:512:4" \
    --mix "0.7=$SHORT,$SHORT,$MIDDLE,$MIDDLE,wide:0.5:4096:1,lm:2:1024:3" \
    --mix "$SHORT,$MIDDLE,wide:0.5:4096/8192:1,lm:3:1024:4"
