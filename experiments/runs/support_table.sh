#!/usr/bin/env bash
# The largest error behind every entry of the README's support table; --write renews the table itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m tests.support.support_table "$@"
