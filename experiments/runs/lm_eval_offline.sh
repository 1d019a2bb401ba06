#!/usr/bin/env bash
# RULER's locally made tasks on the embedded pair, dense and at three keep rates, 1K to 8K tokens; about an hour on one
# thread. Once before: pip install --constraint constraints.txt '.[lm-eval]'. PYTHON names the interpreter.
#     lm_eval_offline.sh [OUT_FOLDER] [SAMPLES] [HAYSTACK_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
python=${PYTHON:-.venv/bin/python}
out=${1:-build/lm_eval}
samples=${2:-20}
haystack=${3:-docs}
lengths=${LENGTHS:-1024, 2048, 4096, 8192}
tokenizer=spec_stack/assets/target
mkdir -p "$out"

for rate in dense 0.1 0.2 0.3; do
    if [ "$rate" = dense ]; then how=sparse_prefill=off; else how="sparse_prefill=on,keep_rate=$rate"; fi
    "$python" -m spec_stack.lm_eval run --model spec_stack --device cpu --batch_size 1 \
        --model_args "$how,tokenizer=$tokenizer,metrics=$out/requests_$rate.jsonl" \
        --include_path experiments/quality/lm_eval_tasks --tasks local_niah local_vt local_cwe local_fwe \
        --metadata "{\"max_seq_lengths\": [$lengths], \"num_samples\": $samples, \"haystack\": \"$haystack\"}" \
        --output_path "$out/$rate" --apply_chat_template
done
