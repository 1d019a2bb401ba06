# Two commands matter: `make demo` and `make test`. `make check` is the short one, for while you work.
# Each makes the virtual environment that it needs first. Linux, Python 3.11 or newer.
PYTHON ?= python3
# Another transformers than that of constraints.txt has an environment of its own: `make check TRANSFORMERS=5.12.1`.
# `lowest` is the first that pyproject.toml allows.
NEWEST_TRANSFORMERS := $(shell sed -n 's/^transformers==//p' constraints.txt)
LOWEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
TRANSFORMERS ?= $(NEWEST_TRANSFORMERS)
override TRANSFORMERS := $(TRANSFORMERS:lowest=$(LOWEST_TRANSFORMERS))
VENV := .venv$(if $(filter-out $(NEWEST_TRANSFORMERS),$(TRANSFORMERS)),-transformers-$(TRANSFORMERS))
BIN := $(VENV)/bin
# The SGLang that serving-test runs, of those that spec_stack/sglang/plugin.py allows; each has an environment.
NEWEST_SGLANG := $(shell sed -n 's/^sglang==//p' tests/serving/requirements.txt)
SGLANG ?= $(NEWEST_SGLANG)
SERVING := .venv-serving$(if $(filter-out $(NEWEST_SGLANG),$(SGLANG)),-$(SGLANG))
# What SGLang to 0.5.21 pins.
OF_OLDER_SGLANG := -e 's/^transformers==.*/transformers==5.12.1/' -e 's/^tokenizers==.*/tokenizers==0.22.2/'
# Named by its content: a copy of an environment from elsewhere may be newer than files that have changed since.
SUPPORT := $(SERVING)/.support-$(shell cat tests/serving/support/* | cksum | cut -d' ' -f1)
DOCS := .venv-docs
# Test processes side by side, each with one torch thread.
WORKERS ?= 2
PYTEST := env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# Packages of which another transformers wants other versions.
OF_TRANSFORMERS := -e '/^tokenizers==/d' -e '/^huggingface_hub==/d'
# An index with PyTorch's CPU builds: torch comes from there, before anything could pull gigabytes of CUDA.
TORCH_CPU_INDEX ?=
TORCH_FIRST = $(if $(TORCH_CPU_INDEX),$(1)/bin/python $(PIP_INSTALL) --no-deps --index-url $(TORCH_CPU_INDEX) $(shell grep -w '^torch' $(2)))

.PHONY: demo check quick-test test core-test lint docs docs-serve serving-test figures figures-small clean

demo: $(VENV)/.ready
	$(BIN)/spec-stack demo

# `make check CHECK="not nightly"` leaves nothing out that `make test` runs of the core.
CHECK ?= not slow and not nightly
check:
	$(MAKE) --jobs=2 --output-sync=line lint quick-test

quick-test: $(VENV)/.ready
	$(PYTEST) -m "$(CHECK) and not serving and not gpu"

# Left out here are the tests marked `nightly`, each one more kind of what another shows; `make test TESTS=` has them.
TESTS ?= not nightly
# The two suites run side by side: tests of servers wait half of the time.
test:
	$(MAKE) --jobs=2 --output-sync=line lint docs
	$(MAKE) --jobs=2 --output-sync=line core-test serving-test

core-test: $(VENV)/.ready
	$(PYTEST) --durations=25 -m "not serving$(if $(TESTS), and ($(TESTS)))"

# SGLang pins its own transformers, so it has an environment of its own. The core's tests run under an older transformers
# with `make check TRANSFORMERS=lowest`.
# `make serving-test SGLANG=0.5.20` for an older one; the newest is what `make test` runs, all of them run every night,
# with the launches that are left to it (`make serving-test SERVING_TESTS=`).
SERVING_TESTS ?= not nightly
# A file's tests go to one worker, so that a server of a file is launched once.
SERVING_WORKERS ?= 2
serving-test: $(SERVING)/.ready
	OMP_NUM_THREADS=1 $(SERVING)/bin/python -m pytest -n $(SERVING_WORKERS) --dist loadfile --durations=25 -m "$(SERVING_TESTS)" tests/serving

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Reads the sources and imports nothing, so its environment holds neither torch nor the package.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

docs-serve: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

# constraints.txt pins the versions the checks were run with; installed from elsewhere, the ranges of pyproject.toml hold.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(call TORCH_FIRST,$(VENV),constraints.txt)
	sed -e 's/^transformers==.*/transformers==$(TRANSFORMERS)/' $(if $(filter-out .venv,$(VENV)),$(OF_TRANSFORMERS)) constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python $(PIP_INSTALL) --constraint $(VENV)/constraints.txt --editable '.[dev]'
	touch $@

$(SERVING)/.ready: $(SUPPORT)
	touch $@

$(SERVING)/.packages: pyproject.toml tests/serving/requirements.txt
	$(PYTHON) -m venv $(SERVING)
	$(call TORCH_FIRST,$(SERVING),tests/serving/requirements.txt)
	sed -e 's/^sglang==.*/sglang==$(SGLANG)/' $(if $(filter 0.5.20 0.5.21,$(SGLANG)),$(OF_OLDER_SGLANG)) tests/serving/requirements.txt > $(SERVING)/requirements.txt
	$(SERVING)/bin/python $(PIP_INSTALL) --no-deps -r $(SERVING)/requirements.txt
	$(SERVING)/bin/python $(PIP_INSTALL) --no-deps --editable .
	touch $@

$(SUPPORT): $(SERVING)/.packages
	$(SERVING)/bin/python $(PIP_INSTALL) --no-deps --force-reinstall ./tests/serving/support
	rm -f $(SERVING)/.support-*
	touch $@

# The packages are the extra `docs` of pyproject.toml, installed without the package itself.
$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)/requirements.txt
	$(DOCS)/bin/python $(PIP_INSTALL) --constraint constraints.txt -r $(DOCS)/requirements.txt
	touch $@

# The README's rows, each by its command: of the embedded pair in minutes, offline; of a real pair, fetched by name, in
# hours (`make figures MINUTES=30` begins nothing after so many minutes a row, and the next call goes on).
TARGET ?= Qwen/Qwen2.5-Coder-1.5B-Instruct
DRAFT ?= Qwen/Qwen2.5-Coder-0.5B-Instruct
figures-small: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.figures --out figures/small

figures: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.figures --out figures/real --target $(TARGET) --draft $(DRAFT) \
	  $(if $(MINUTES),--minutes $(MINUTES))

clean:
	rm -rf .venv .venv-* site
