#!/usr/bin/env bash
# Conversations of a real pair on SGLang servers, beside STANDALONE and no speculation, every reply beside Transformers':
# real_serving.sh TARGET DRAFT [options]. About half an hour on two quiet cores and the check.
# Once before: make .venv-serving/.ready
set -euo pipefail
# Three servers share the machine's memory: room for so many tokens each, and a share of what is left when it starts.
"$(dirname "$0")/serving.sh" --target "$1" --draft "$2" --parts conversations --arms off STANDALONE SPEC_STACK --check \
    --precision bf16 --chunk 2048 --repeats 5 \
    --server-args '--dtype bfloat16 --mem-fraction-static 0.85 --max-total-tokens 12000' "${@:3}"
