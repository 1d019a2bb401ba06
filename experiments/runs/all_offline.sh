#!/usr/bin/env bash
# Everything that runs without a network, one thread, in turn; hours on one core. Then: which results are stale.
#     all_offline.sh                 all of it
#     all_offline.sh NAME…           only these
#     all_offline.sh --stale         run nothing, say what is stale and why
# DATA=FOLDER adds what needs the published prompt files (bench_policies); PYTHON names another interpreter, for the parts
# that take it. Each part leaves its last line, JSON, in experiments/results/NAME.json. What needs SGLang (bench_serving)
# has scripts of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
python=${PYTHON:-.venv/bin/python}
results=experiments/results

if [ "${1:-}" = --stale ]; then
    exec "$python" -m experiments.common.results --stale
fi

wanted=("$@")
# Run a part if it was asked for, show what it prints, keep its last line.
part() {
    local name=$1
    shift
    if [ ${#wanted[@]} -gt 0 ] && [[ ! " ${wanted[*]} " == *" $name "* ]]; then
        return
    fi
    echo "== $name" >&2
    "$@" | tee /dev/stderr | tail -n 1 >"$results/$name.json.unfinished"
    mv "$results/$name.json.unfinished" "$results/$name.json"
}

part session_suite experiments/runs/session_suite.sh
part bench_latency experiments/runs/bench_latency.sh
part prefill_grid experiments/runs/prefill_grid.sh
part bench_prepack experiments/runs/bench_prepack.sh
part decode_collapse experiments/runs/decode_collapse.sh
if [ -n "${DATA:-}" ]; then
    part bench_policies experiments/runs/bench_policies.sh "$DATA"
fi
"$python" -m experiments.common.results
