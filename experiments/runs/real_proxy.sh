#!/usr/bin/env bash
# A running engine, direct and behind one proxy a draft, resumable: real_proxy.sh URL MODEL TOKENIZER ROWS.jsonl DRAFT…
set -euo pipefail
cd "$(dirname "$0")/../.."
url=$1 model=$2 tokenizer=$3 rows=$4 port=8741
arms=(--arm "direct=$url")
trap 'kill $(jobs -p)' EXIT
for draft in "${@:5}"; do
  # One conversation at a time: scoring may take as long as it does.
  .venv/bin/spec-stack proxy --upstream "$url" --draft "$draft" --port $port --deadline-s 300 &
  arms+=(--arm "$(basename "$(dirname "$draft")")=http://127.0.0.1:$port")
  port=$((port + 1))
done
for own in "${arms[@]:2}"; do
  [[ $own == --arm ]] || until curl -sf "${own#*=}/health" > /dev/null; do sleep 1; done
done
.venv/bin/python -m experiments.serving.proxy "${arms[@]}" --model "$model" --tokenizer "$tokenizer" --rows "$rows" ${OPTIONS:-}
