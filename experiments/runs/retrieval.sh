#!/usr/bin/env bash
# Hidden facts answered by dense and by sparse prefill, 20 seeded prompts per length.
set -euo pipefail
cd "$(dirname "$0")/../.."
.venv/bin/python -m experiments.quality.retrieval --tokens 2000 4000 8200 --keep-rates 0.1 0.2 0.3 --prompts 20 --threads 1 "$@"
