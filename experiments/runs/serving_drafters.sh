#!/usr/bin/env bash
# Sparse prefill with every way to draft on SGLang: none, SPEC_STACK, and a scoring model with STANDALONE, NGRAM and
# EAGLE3. First token, tokens/s, accepted lengths: serving_drafters.sh ROWS.jsonl [options of serving.sh].
# The embedded pair and the head trained for it, unless --target, --draft and HEAD (a folder or name) say otherwise.
# On a card, in SGLang's environment (real kernels, FlashInfer, CUDA graphs, overlap, one rank):
#   PYTHON=python HEAD=EAGLE3_HEAD serving_drafters.sh ROWS.jsonl --device cuda --target TARGET --draft DRAFT \
#       --lengths 8192 32768 --server-args '--attention-backend flashinfer --mem-fraction-static 0.15'
set -euo pipefail
chain='--speculative-eagle-topk 1 --speculative-num-steps 2 --speculative-num-draft-tokens 3'
long='--speculative-eagle-topk 1 --speculative-num-steps 7 --speculative-num-draft-tokens 8'
scoring='--spec-stack-scoring-model DRAFT'
head=${HEAD:-tests/serving/eagle3_head}
"$(dirname "$0")/serving.sh" --parts lengths --arms off SPEC_STACK --rows "$1" "${@:2}" \
    --arm "none + scoring=$scoring" \
    --arm "STANDALONE + scoring=--speculative-algorithm STANDALONE --speculative-draft-model-path DRAFT $chain $scoring" \
    --arm "STANDALONE of 7 + scoring=--speculative-algorithm STANDALONE --speculative-draft-model-path DRAFT $long $scoring" \
    --arm "NGRAM + scoring=--speculative-algorithm NGRAM --speculative-ngram-capacity 200000 $scoring" \
    --arm "EAGLE3 + scoring=--speculative-algorithm EAGLE3 --speculative-draft-model-path $head $chain $scoring"
