#!/usr/bin/env bash
# Recorded agents on an SGLang server, quiet machine: replay_agents.sh SESSIONS.jsonl [options]
set -euo pipefail
sessions=${1:?usage: replay_agents.sh SESSIONS.jsonl [options]}
shift
cd "$(dirname "$0")/../.."
PYTHONPATH=$PWD/tests/serving/support .venv-serving/bin/python -m experiments.serving.replay_agents "$sessions" "$@"
