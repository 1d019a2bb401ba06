#!/usr/bin/env bash
# What a follow-up waits for and what is left of the text it asks about, by rule, on the embedded pair: eight turns over
# an 8K document and four with 2K to 4K of tool output a turn, with 1 and 4 clients, facts asked for turn by turn, and the
# draft's pool when it is full. Meant for 2 cores with nothing else running; every part says how long it took. Once before:
#   make .venv-serving/.ready
# That environment has stand-ins for what SGLang lacks on a CPU (see bench_serving.sh). To compare with an earlier version
# of this project as well: --arms dense freeze afresh recall earlier --earlier FOLDER.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv-serving/bin/python}
"$PYTHON" -m experiments.serving.follow_ups --out experiments/results/follow_ups.json "$@"
