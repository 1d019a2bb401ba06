#!/usr/bin/env bash
# SpecPrefill's tables, on your pair. Needs a network (data sets), lm-eval (for RULER wonderwords and scipy too), and a GPU for
# pairs of a real size; none of it has been run on one by this project.
#     TARGET=meta-llama/Llama-3.1-70B-Instruct DRAFT=meta-llama/Llama-3.1-8B-Instruct paper_tables.sh [TABLE…]
# SpecPrefill (https://arxiv.org/abs/2502.02789): longbench (its table 1 and figures 2 and 8), ruler (its table 2).
# A table's name may be given; default: all.
# LIMIT bounds the documents per task; OUT is the folder for results.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
out=${OUT:-build/paper_tables}
limit=${LIMIT:+--limit $LIMIT}
mkdir -p "$out"

evaluate() { # NAME MODEL_ARGS TASKS…
    local name=$1 arguments=$2
    shift 2
    # shellcheck disable=SC2086
    "$python" examples/lm_eval_harness.py run --model spec_stack --batch_size 1 --apply_chat_template \
        --model_args "target=$TARGET,draft=$DRAFT,$arguments,records=$out/$name.steps.jsonl" \
        --tasks "$@" $limit --output_path "$out/$name"
}

longbench() { # by keep rate and category; the ablations without look-ahead are its "Full"
    evaluate longbench_dense sparse_prefill=off longbench
    for rate in 0.1 0.3 0.5 0.7 0.9; do evaluate "longbench_$rate" "sparse_prefill=on,keep_rate=$rate" longbench; done
}

ruler() { # by length, at keep rate 0.1
    for rate in off 0.1; do
        if [ "$rate" = off ]; then how=sparse_prefill=off; else how="sparse_prefill=on,keep_rate=$rate"; fi
        # shellcheck disable=SC2086
        "$python" examples/lm_eval_harness.py run --model spec_stack --batch_size 1 --apply_chat_template --tasks ruler $limit \
            --model_args "target=$TARGET,draft=$DRAFT,tokenizer=$TARGET,$how" --output_path "$out/ruler_$rate" \
            --metadata '{"max_seq_lengths": [4096, 8192, 16384, 32768, 65536, 131072]}'
    done
}

: "${TARGET:?name the target, a folder or hub id}" "${DRAFT:?name the draft}"
if [ $# -eq 0 ]; then set -- longbench ruler; fi
for table in "$@"; do "$table"; done
