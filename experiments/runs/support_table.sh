#!/usr/bin/env bash
# The largest error behind every entry of the support table; --write renews the table in docs/support.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 .venv/bin/python -m tests.support.support_table "$@"
