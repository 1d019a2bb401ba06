#!/usr/bin/env bash
# Teach the pair in PAIR to answer questions in many wordings (experiments/pair/wording.py and grammar.py), on one CPU
# thread: the target first, then the draft, distilled from it. Both go on from PAIR and keep their shapes, but for wider
# MLPs in the draft. AT_ONCE=1 trains both at once, a thread each: the draft learns text from TEACHER until the new target is
# done, and from that one after. TEACHER is PAIR's target, unless PAIR itself is on its way: then the one it came from.
#   CORPUS=CORPUS PAIR=spec_stack/assets RUN=RUN bash experiments/runs/train_pair_tasks.sh
# MINUTES=480 is the whole of it in processor minutes, so that a run that is stopped, or shares its core, loses nothing. An
# interrupted run (SIGTERM ends it with a checkpoint) goes on when it is started again.
# UNTIL=0.5 ends both models at that share of their time, so that a part of the run already gives a pair; RUN/pair is it.
set -euo pipefail
CORPUS=$(realpath "${CORPUS:?a folder of *.jsonl(.xz) files}")
PAIR=$(realpath "${PAIR:?the pair to continue}")
TEACHER=$(realpath "${TEACHER:-$PAIR/target}")
RUN=$(realpath -m "${RUN:?the folder for data, checkpoints and the pair}")
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
MINUTES=${MINUTES:-480}
UNTIL=${UNTIL:-1}
AT_ONCE=${AT_ONCE:-}
TRAIN=("${PYTHON:-python3}" -m experiments.pair.train)

minutes() { awk -v all="$MINUTES" -v part="$1" -v until="$2" 'BEGIN { print all * part * until }'; }

[ -f "$RUN/data/info.json" ] || "${TRAIN[@]}" prepare --corpus "$CORPUS" --data "$RUN/data" \
    --tokenizer-from "$PAIR/target" --exclude cpython-3.13-stdlib

# train NAME SHARE ARGUMENTS…: in the background, so that a signal is not kept waiting. RUN/NAME.pid trains.
train() {
    "${TRAIN[@]}" train --data "$RUN/data" --threads 1 --out "$RUN/$1" --init "$PAIR/$1" --save-s 180 --average 0.98 \
        --minutes "$(minutes "$2" 1)" --stop-minutes "$(minutes "$2" "$UNTIL")" "${@:3}" &
    echo $! >"$RUN/$1.pid"
    wait $!
    "${TRAIN[@]}" export --run "$RUN/$1" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/$1"
}

stop_with_me() {
    trap 'trap "" INT TERM; kill $(jobs -p) 2>/dev/null || true; wait' EXIT
    trap 'exit 130' INT TERM
}
stop_with_me

# Many short documents first, since what a question costs is its document; then longer ones, then the longest with more text,
# while the rate goes to zero. Held-out text is kept by the old target's own choices (--teacher); it gets worse
# in the first phase all the same (by a fifth at twice this rate), so the last one is mostly text.
SHORT=wide:0.3:224/256/320/384:1
MIDDLE=wide:0.3:512/768/1024/2048:1
LONG=wide:0.3:4096/8192:1
train_target() {
    train target 0.6 --teacher "$TEACHER" --distil 0.5 --lr 0.003 --other-lr 2e-4 --warmup 30 --copy-weight 0.2 \
        --middle-layer 3 --middle-weight 0.3 --first-weight 4 --decay-from 0.4 \
        --mix "0.5=$SHORT,$SHORT,$SHORT,$SHORT,$SHORT,$SHORT,$SHORT,$MIDDLE,lm:2:512:2" \
        --mix "0.75=$SHORT,$SHORT,$SHORT,$MIDDLE,$MIDDLE,wide-sparse:0.3:4096:1,lm:2:1024:2" \
        --mix "$SHORT,$MIDDLE,$LONG,wide-sparse:0.3:8192:1,lm:3:1024:3"
}

# Half of the documents are read with a window of 128 and 64 sinks. The attention of the last layer to the evidence is part
# of the loss, because it chooses what sparse prefill keeps.
# train_draft TEACHER
train_draft() {
    train draft 0.4 --teacher "$1" --distil 0.7 --lr 0.003 --other-lr 3e-4 --warmup 30 --widen-mlp 384 \
        --attention-weight 0.3 --copy-weight 0.1 --first-weight 4 --windowed 0.5 --decay-from 0.4 \
        --mix "0.4=$SHORT,$SHORT,$SHORT,$SHORT,$MIDDLE,$MIDDLE,$MIDDLE,$MIDDLE,lm:1.5:512:3" \
        --mix "0.7=$SHORT,$SHORT,$MIDDLE,$MIDDLE,$MIDDLE,$LONG,lm:2:1024:3" \
        --mix "$SHORT,$MIDDLE,$LONG,lm:3:1024:4"
}

if [ -n "$AT_ONCE" ]; then
    (
        stop_with_me
        train_draft "$TEACHER"
    ) &
    early=$!
    train_target
    # It ends with a checkpoint, and its shell with it; a draft that is done already is as good.
    kill "$(cat "$RUN/draft.pid")" 2>/dev/null || true
    wait $early || true
else
    train_target
fi
train_draft "$RUN/pair/target"
