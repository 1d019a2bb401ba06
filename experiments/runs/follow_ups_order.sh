#!/usr/bin/env bash
# Where a server writes what comes back: 20 documents with 12 facts of each kind, both orders. Needs what follow_ups.sh needs.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv-serving/bin/python}
folder=$(mktemp -d)
for family in codes mixed; do
  for order in written position; do
    echo "{\"recall\": {\"order\": \"$order\"}}" > "$folder/$order.json"
    "$PYTHON" -m experiments.serving.follow_ups --arms dense recall --parts facts --documents 20 --fact-turns 5 --family $family \
      --server-args "--spec-stack-config $folder/$order.json" --out "experiments/results/follow_ups_${family}_$order.json"
  done
done
