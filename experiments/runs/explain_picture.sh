#!/usr/bin/env bash
# docs/images/explain.png: the page of `spec-stack explain` about the demo's document, photographed by Chromium.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m spec_stack explain --demo --compare --device cpu --max-tokens 40 --out "$folder/page.html"
"${BROWSER:-chromium}" --headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --user-data-dir="$folder/profile" \
    --window-size=1280,1000 --screenshot="$PWD/docs/images/explain.png" "file://$folder/page.html" 2> "$folder/log"
