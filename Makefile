# `make` lists the targets. Python 3.10 or later and make are all that has to be there beforehand.

PYTHON ?= python3
VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
WORKERS ?= 2
PYTEST_ARGS ?=
QUICKSTART_ARGS ?=
ARITHMETIC_ARGS ?=
BENCH_ARGS ?=
GPU_BENCH_ARGS ?=

# The newest versions (TRL from 1.15 on, for one) need Python 3.11; on 3.10 the oldest are installed.
CONSTRAINTS ?= $(shell $(PYTHON) -c "import sys; print('constraints.txt' if sys.version_info >= (3, 11) else 'constraints-oldest.txt')")

# One thread a process: torch processes side by side on few cores slow each other more than tenfold otherwise.
TEST_ENV = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help install options quickstart arithmetic bench bench-gpu test test-oldest lint soak

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "Variables: PYTHON=$(PYTHON) WORKERS=$(WORKERS) PYTEST_ARGS=... QUICKSTART_ARGS=... ARITHMETIC_ARGS=... BENCH_ARGS=... GPU_BENCH_ARGS=..."

install: $(VENV)/.installed  ## make .venv with the package and everything the tests need

quickstart: $(VENV)/.installed  ## all of RLHF on a tiny model, offline, into runs/quickstart/
	$(VENV)/bin/python scripts/quickstart.py $(QUICKSTART_ARGS)

arithmetic: $(VENV)/.installed  ## PPO with checked answers teaches a tiny model to add, offline, into runs/arithmetic/
	$(VENV)/bin/python scripts/arithmetic.py $(ARITHMETIC_ARGS)

bench: $(VENV)/.installed  ## time and memory beside TRL 1.12's PPO, into runs/benchmark/
	$(VENV)/bin/python scripts/benchmark.py $(BENCH_ARGS)

bench-gpu: $(VENV)/.installed  ## memory, plan and speed of real shapes on a GPU, into runs/benchmark_gpu/
	$(VENV)/bin/python scripts/benchmark_gpu.py $(GPU_BENCH_ARGS)

options: $(VENV)/.installed  ## write docs/options.md, the table of all options
	$(VENV)/bin/python scripts/options.py

test: $(VENV)/.installed  ## all tests but the long ones, on two cores
	$(TEST_ENV) $(VENV)/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

test-oldest: $(VENV_OLDEST)/.installed  ## the fast tests on the oldest versions that pyproject.toml allows
	$(TEST_ENV) $(VENV_OLDEST)/bin/python -m pytest -n $(WORKERS) -m "not soak and not gpu" --ignore tests/integration $(PYTEST_ARGS)

lint: $(VENV)/.installed  ## ruff, formatting, types, and the direction of imports
	$(VENV)/bin/python -m ruff check
	$(VENV)/bin/python -m ruff format --check
	$(VENV)/bin/python -m mypy ppo_lora
	$(TEST_ENV) $(VENV)/bin/python -m pytest tests/test_import_direction.py -q

soak: $(VENV)/.installed  ## the long tests
	$(TEST_ENV) $(VENV)/bin/python -m pytest -m soak -n $(WORKERS) --timeout 3600 $(PYTEST_ARGS)

$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(call installed,$(@D),$(CONSTRAINTS))

$(VENV_OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(call installed,$(@D),constraints-oldest.txt)

# $(call installed,environment,constraints): the stamp is written last, so an interrupted installation starts again.
define installed
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --progress-bar off --upgrade pip
$(1)/bin/python -m pip install --progress-bar off -c $(2) -e ".[dev]"
touch $(1)/.installed
endef
