#!/usr/bin/env bash
# A server's policies for gamma, live, at 1, 4 and 8 requests at once, on the embedded pair; the first argument is the
# folder that holds the four published prompt files. About an hour and a half on 2 cores with nothing else running, a third
# of it with: --policies throughput heuristic --fixed 2 4 --no-plain --no-signals. Once before:
#   make .venv-serving/.ready
# That environment has stand-ins for what SGLang lacks on a CPU (see bench_serving.sh). SGLang's overlap is on, as by
# default: --server-args --disable-overlap-schedule is the other way.
set -euo pipefail
data=${1:?usage: batch_policies.sh DATA_FOLDER [options]}
shift
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv-serving/bin/python}
"$PYTHON" -m experiments.serving.batch_policies \
    "code=$data/humaneval/HumanEval.jsonl.gz" "math=$data/gsm8k/test.jsonl" \
    "chat=$data/mtbench/question.jsonl" "summary=$data/specbench/question.jsonl:summarization" \
    --out experiments/results/batch_policies.json "$@"
