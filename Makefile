# Two commands matter: `make train` and `make test`. Each brings its own .venv; nothing else is needed
# but Python 3.11+ and make.

PYTHON ?= python3
RECIPE ?= shapes-cnn
ARGS ?=
# For example PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for a CPU-only torch.
PIP_ARGS ?=

BIN := .venv/bin
READY := .venv/.ready

.PHONY: help setup train test test-slow lint type check format clean
.DEFAULT_GOAL := help

help:
	@echo "make train       train the default recipe on this machine (RECIPE=name ARGS='--epochs 3')"
	@echo "make test        run the tests (minutes)"
	@echo "make test-slow   run the slow tests: real CIFAR-10, whole training runs"
	@echo "make check       lint, type, test: what a commit must pass"
	@echo "make setup       only bring .venv up to date"

setup: $(READY)

# Package indexes answer "too many requests" at times, so installing is tried a few times with growing pauses.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Paceline needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 ..."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (once; torch is large)"
	@for pause in 5 15 45 0; do \
		PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[dev]' && break; \
		test $$pause -gt 0 || { echo "error: the packages could not be installed"; exit 1; }; \
		echo "installing failed; trying again in $$pause s"; sleep $$pause; \
	done
	@touch $@

train: setup
	@$(BIN)/paceline train $(RECIPE) $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup
	$(BIN)/mypy

check: lint type test

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
