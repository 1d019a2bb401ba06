#!/usr/bin/env bash
# The embedded pair from nothing on a CPU: tokenizer, target (6 layers x 256), draft (2 layers x 128) distilled from it;
# then run train_pair_continue.sh on the result for long contexts. About an hour and a half on 2 cores.
#   CORPUS=CORPUS RUN=RUN bash experiments/runs/train_pair_cpu.sh
# The starter pair was trained with this recipe by an earlier trainer, whose schedules were steered by hand.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
CORPUS=${CORPUS:?a folder of *.jsonl(.xz) files}
RUN=${RUN:?the folder for data, checkpoints and the pair}
THREADS=${THREADS:-2}
TRAIN="$PYTHON experiments/train_pair.py"
COMMON="--data $RUN/data --threads $THREADS --decay-from 0.5"

[ -f "$RUN/data/info.json" ] || $TRAIN prepare --corpus "$CORPUS" --data "$RUN/data" --vocab 4096
$TRAIN train $COMMON --shape target --out "$RUN/target" --minutes "${TARGET_MINUTES:-55}" --context-weight 1 \
    --mix "0.4=lm:1:512:6,repeat:0.5:512:2" \
    --mix "0.8=lm:1:512:6,repeat:0.1:512:1,task:0.5:512/1024:1" \
    --mix "lm:1:2048:2,task:0.5:2048/4096:1,sparse:0.2:8192:1" \
    --lr 0.015 --other-lr 3e-3 --gapped 0.3
$TRAIN export --run "$RUN/target" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/target"
$TRAIN train $COMMON --shape draft --seed-heads --out "$RUN/draft" --teacher "$RUN/pair/target" \
    --minutes "${DRAFT_MINUTES:-25}" --attention-weight 0.3 \
    --mix "0.5=lm:1:512:4,repeat:0.7:512:4" \
    --mix "lm:1:1024:4,repeat:0.1:512:1,task:0.5:1024/2048:1" \
    --lr 0.012 --other-lr 3e-3
$TRAIN export --run "$RUN/draft" --tokenizer "$RUN/data/tokenizer" --to "$RUN/pair/draft"
