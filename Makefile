# Two commands matter: `make demo` and `make test`. Both make their own virtual environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVING := .venv-serving

.PHONY: demo test lint serving-test clean

demo: $(VENV)/.ready
	$(BIN)/spec-stack demo

test: lint
	PYTHON=$(CURDIR)/$(BIN)/python bash experiments/runs/train_pair_smoke.sh
	$(BIN)/python -m pytest
	$(MAKE) serving-test

# SGLang pins its own transformers, so it has an environment of its own; the core's tests must pass under that one too.
serving-test: $(SERVING)/.ready
	OMP_NUM_THREADS=1 $(SERVING)/bin/python -m pytest tests/hf/test_model.py tests/decode/test_loop.py tests/serving

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# constraints.txt pins the versions the checks were run with; installed from elsewhere, the ranges of pyproject.toml hold.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(SERVING)/.ready: pyproject.toml tests/serving/requirements.txt $(wildcard tests/serving/support/*)
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/serving/requirements.txt
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . ./tests/serving/support
	touch $@

clean:
	rm -rf $(VENV) $(SERVING)
