#!/usr/bin/env bash
# A larger pair (target 8 layers x 384, draft 2 layers x 192, vocabulary 8192, 16K positions) on one H100-class card,
# in at most 20 minutes. Not run yet on such a card: the smoke run and the CPU recipe use the same code.
#   1. anywhere:    python experiments/train_pair.py prepare --corpus CORPUS --data DATA --vocab 8192 --share 0.6
#                   (under 30 MiB of token files)
#   2. on the card: DATA=DATA OUT=OUT bash experiments/runs/train_pair_gpu.sh       resumes what RUN already has
#   3. anywhere:    python experiments/train_pair.py unpack --packed OUT --tokenizer DATA/tokenizer --to PAIR
# Needs torch, transformers and tokenizers. Writes 5 files of at most 15 MiB to OUT; checkpoints stay in RUN.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
DATA=${DATA:?the folder that prepare wrote}
OUT=${OUT:?the folder for the packed weights}
RUN=${RUN:-$(dirname "$OUT")/pair_run}
TARGET_MINUTES=${TARGET_MINUTES:-11}
DRAFT_MINUTES=${DRAFT_MINUTES:-5}
TRAIN="$PYTHON experiments/train_pair.py"
COMMON="--data $DATA --device cuda --compile --threads 8 --save-s 120 --warmup 100"

$TRAIN train $COMMON --shape target-gpu --out "$RUN/target" --minutes "$TARGET_MINUTES" \
    --mix "0.6=lm:1:1024:48,repeat:0.2:512:16" \
    --mix "lm:1:2048:24,task:0.5:2048/4096/8192:1,sparse:0.25:8192:1" \
    --lr 0.02 --other-lr 3e-3 --decay-from 0.5
$TRAIN pack --run "$RUN/target" --to "$OUT"  # so that an interrupted draft still leaves the target
$TRAIN export --run "$RUN/target" --tokenizer "$DATA/tokenizer" --to "$RUN/pair/target"
$TRAIN train $COMMON --shape draft-gpu --seed-heads --out "$RUN/draft" --teacher "$RUN/pair/target" \
    --minutes "$DRAFT_MINUTES" --attention-weight 0.3 \
    --mix "0.5=lm:1:1024:32,repeat:0.4:512:16" \
    --mix "lm:1:2048:16,task:0.3:4096/8192:1,task:0.3:2048/16000:1" \
    --lr 0.02 --other-lr 3e-3 --decay-from 0.5
$TRAIN pack --run "$RUN/target" --run "$RUN/draft" --to "$OUT"
