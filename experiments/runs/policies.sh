#!/usr/bin/env bash
# Policies by replay of the shipped profile (embedded pair), on the CPU in some minutes: experiments/results/policies.json
set -euo pipefail
cd "$(dirname "$0")/../.."
OMP_NUM_THREADS=1 ${PYTHON:-.venv/bin/python} -W ignore -m experiments.policies.evaluate_policies \
    experiments/results/profile.parquet --stress --out experiments/results/policies.json
