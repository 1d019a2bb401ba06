#!/usr/bin/env bash
# A larger pair (target 8 layers x 384, draft 2 layers x 192, vocabulary 8192, 16K positions) on one H100-class card,
# in at most 20 minutes. No card has run it yet.
#   1. anywhere:    python -m experiments.pair.train prepare --corpus CORPUS --data DATA --vocab 8192 --share 0.6 \
#                       --exclude cpython-3.13-stdlib                               (under 30 MiB of token files)
#   2. on the card: DATA=DATA OUT=OUT bash experiments/runs/train_pair_gpu.sh       resumes what OUT.run already has
#   3. anywhere:    python -m experiments.pair.train unpack --packed OUT --tokenizer DATA/tokenizer --to PAIR
# Needs torch (with Muon: 2.9 or newer), transformers and tokenizers; compiles its blocks where there is a C compiler.
# Writes 5 files of at most 15 MiB to OUT; checkpoints stay in RUN.
# A second run, on a bare card, takes the first one's OUT and the rest of the text:
#   1. … prepare --corpus CORPUS --data DATA2 --tokenizer-from DATA/tokenizer --share 0.4 --from-share 0.6 --exclude …
#   2. DATA=DATA2 FROM=OUT OUT=OUT2 bash experiments/runs/train_pair_gpu.sh
# To see all of it happen without a card, untrained at the end: COMPILE= DEVICE=cpu BATCH_SCALE=1/16 TARGET_MINUTES=2
# DRAFT_MINUTES=1 DATA=DATA OUT=OUT bash experiments/runs/train_pair_gpu.sh
set -euo pipefail
DATA=$(realpath "${DATA:?the folder that prepare wrote}")
OUT=$(realpath -m "${OUT:?the folder for the packed weights}")
RUN=$(realpath -m "${RUN:-$OUT.run}")
FROM=${FROM:+$(realpath "$FROM")}
cd "$(dirname "$0")/../.."
DEVICE=${DEVICE:-cuda}
THREADS=${THREADS:-8}
BATCH_SCALE=${BATCH_SCALE:-1}
TARGET_MINUTES=${TARGET_MINUTES:-11}
DRAFT_MINUTES=${DRAFT_MINUTES:-5}
MAX_TOKENS=${MAX_TOKENS:-400e6}  # about 30 epochs of one folder: held-out loss is printed every two minutes
TRAIN=("${PYTHON:-python3}" -m experiments.pair.train)
COMMON=(--data "$DATA" --device "$DEVICE" ${COMPILE---compile} --threads "$THREADS" --max-tokens "$MAX_TOKENS"
    --save-s 120 --warmup 100 --lr 0.02 --other-lr 3e-3 --decay-from 0.5)

rows() { echo $(($1 * $BATCH_SCALE)); }
train() {  # train NAME ARGUMENTS…: from nothing, or from what FROM has of it
    local start=(--shape "$1-gpu" --seed-heads)
    if [ -d "$RUN/from/$1" ]; then start=(--init "$RUN/from/$1"); fi
    "${TRAIN[@]}" train "${COMMON[@]}" "${start[@]}" --out "$RUN/$1" "${@:2}"
}

[ -z "$FROM" ] || "${TRAIN[@]}" unpack --packed "$FROM" --tokenizer "$DATA/tokenizer" --to "$RUN/from"
train target --minutes "$TARGET_MINUTES" --copy-weight 0.2 --middle-layer 4 --middle-weight 0.2 \
    --mix "0.4=lm:1:1024:$(rows 48),repeat:0.2:512:$(rows 16)" \
    --mix "0.8=lm:1:1024:$(rows 24),wide:1:512/1024:$(rows 32),wide:0.5:2048:1,wide-sparse:0.25:4096:1" \
    --mix "lm:1:2048:$(rows 24),wide:0.5:1024:$(rows 16),wide:0.5:4096/8192:1,wide-sparse:0.25:8192:1"
"${TRAIN[@]}" pack --run "$RUN/target" --to "$OUT"  # so that an interrupted draft still leaves the target
"${TRAIN[@]}" export --run "$RUN/target" --tokenizer "$DATA/tokenizer" --to "$RUN/pair/target"
train draft --teacher "$RUN/pair/target" --minutes "$DRAFT_MINUTES" --attention-weight 0.3 \
    --copy-weight 0.1 --windowed 0.5 \
    --mix "0.4=lm:1:1024:$(rows 32),repeat:0.4:512:$(rows 16)" \
    --mix "0.8=lm:1:1024:$(rows 24),wide:1:512/1024:$(rows 32),wide:0.5:1024/2048:1,wide:0.5:4096:1" \
    --mix "lm:1:2048:$(rows 16),wide:0.3:1024/2048:1,wide:0.3:4096/8192:1,wide:0.3:2048/16000:1"
"${TRAIN[@]}" pack --run "$RUN/target" --run "$RUN/draft" --to "$OUT"
