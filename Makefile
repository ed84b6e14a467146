# The main commands are `make train` and `make test`. Both create .venv. They need only Python 3.11+ and make.

PYTHON ?= python3
RECIPE ?= shapes-cnn
FAULTS ?= 100
FUZZ_CASES ?= 1000
ARGS ?=
# For example PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for a CPU-only torch.
PIP_ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
NEXT := ready; now: . $(BIN)/activate && paceline train shapes-cnn, or: make train
# The cluster of make slurm-up: its folder and its size.
SLURM_STATE ?= /var/lib/paceline-slurm
SLURM_SHAPE ?= --nodes 2
SLURM := tests/integrations/slurm/cluster
EXTRAS_BIN := .venv-extras/bin
EXTRAS_READY := .venv-extras/.ready
EXTRAS := dev,torchvision,timm,mlflow,wandb,onnx,parquet
BENCH_BIN := .venv-bench/bin
BENCH_READY := .venv-bench/.ready
DOCS_BIN := .venv-docs/bin
DOCS_READY := .venv-docs/.ready
FLOWS_BIN := .venv-flows/bin
FLOWS_READY := .venv-flows/.ready
QUICK_TESTS := not slow and not gpu and not faults and not slurm and not flows and not browser and not docs and not course and not terminal and not fuzz and not long and not guides
EXTRAS_TESTS := $(addprefix tests/,models/test_external_models.py models/test_external_recipes.py models/test_models.py \
	models/test_timm_equality.py data/test_picture_ops.py metrics/test_sinks.py cli/test_export.py \
	data/test_parquet.py training/test_same_weights_from_sources.py::test_parquet_files_train_the_same_weights)
FLOWS_TESTS := $(addprefix tests/,integrations/metaflow integrations/runnable \
	integrations/test_conformance.py checkpoints/test_object_stores.py data/test_s3_data.py) $(wildcard tests/integrations/kubernetes/test_kubernetes*.py)

.PHONY: help setup train test coverage docs test-docs test-course test-guides test-terminal terminal-install test-extras test-faults test-long test-fuzz test-flows test-browser browser-install test-slow test-slurm slurm-install slurm-up slurm-down soak bench-cpu lint type check format clean
.DEFAULT_GOAL := help

help:
	@echo "make train       train the default recipe on this machine (RECIPE=name ARGS='--epochs 3')"
	@echo "make test        run the tests (minutes)"
	@echo "make test-extras run the tests of torchvision:, timm:, MLflow, W&B and ONNX, in .venv-extras"
	@echo "make test-faults run every fault test: killed, hung, stopped and starved ranks, bad disks, bad numbers"
	@echo "make test-long   try every crash point of a save, and compare long runs bit by bit"
	@echo "make test-fuzz   read damaged files of every format (FUZZ_CASES=1000): only our own errors may appear"
	@echo "make soak        random faults against one run, which must end with the bits of an undisturbed one (FAULTS=100)"
	@echo "make bench-cpu   Paceline beside DDP by hand, Lightning and Accelerate on two CPU ranks (minutes), in .venv-bench"
	@echo "make test-flows  run the tests of Metaflow, Runnable, Kubernetes manifests and object stores, in .venv-flows"
	@echo "make test-browser  look at the pages in a real Chromium (make browser-install)"
	@echo "make docs        build the documentation site into site/, in .venv-docs; open site/index.html"
	@echo "make test-docs   execute every command of the documentation and the README"
	@echo "make test-course grade every answer of the course, on real ranks (and real Slurm where it is)"
	@echo "make test-guides follow every guide as a newcomer: fresh clone, clean venv, install line, first command"
	@echo "make test-terminal  try the terminal in a real one (make terminal-install: tmux, zsh, fish)"
	@echo "make test-slow   run the slow tests: real CIFAR-10, whole training runs"
	@echo "make test-slurm  run the tests on a real Slurm cluster of three nodes on this machine (root; make slurm-install)"
	@echo "make slurm-up    start a Slurm cluster of two nodes on this machine, to learn on; make slurm-down ends it"
	@echo "make check       lint, type, test: what a commit must pass"
	@echo "make setup       only bring .venv up to date"

# Other targets use it too; only `make setup` prints the next step.
setup: $(READY)
	@$(if $(filter setup,$(MAKECMDGOALS)),echo "$(NEXT)",:)

# $(call install,VENV,EXTRAS,CONSTRAINTS,MORE): update a venv and write its stamp.
# Package indexes may answer "too many requests", so an installation is tried a few times with growing pauses.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Paceline needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 ..."; exit 2; }
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "installing into $(1) (once; torch is large)"
	@for pause in 5 15 45 0; do \
		PIP_CONSTRAINT=$(3) $(1)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[$(2)]' $(4) && break; \
		test $$pause -gt 0 || { echo "error: the packages could not be installed"; exit 1; }; \
		echo "installing failed; trying again in $$pause s"; sleep $$pause; \
	done
	@touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call install,.venv,dev,constraints.txt)

$(EXTRAS_READY): pyproject.toml constraints.txt
	$(call install,.venv-extras,$(EXTRAS),constraints.txt)

# Flow engines and cloud clients need other versions of some packages: a separate venv, with its own constraints.
$(FLOWS_READY): pyproject.toml constraints-flows.txt
	$(call install,.venv-flows,flows,constraints-flows.txt)

# The site is built without the package: no torch.
$(DOCS_READY): constraints-docs.txt
	@test -x $(DOCS_BIN)/python || $(PYTHON) -m venv .venv-docs
	@$(DOCS_BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 $(PIP_ARGS) -r constraints-docs.txt
	@touch $@

# The package, and the trainers that it is compared with.
$(BENCH_READY): pyproject.toml constraints.txt benchmarks/requirements-peers.txt
	$(call install,.venv-bench,tensorboard,constraints.txt,-r benchmarks/requirements-peers.txt)

train: setup
	@$(BIN)/paceline train $(RECIPE) $(ARGS)

# Three at a time on two cores: tests wait most of the time.
test: setup
	$(BIN)/python -m pytest -m "$(QUICK_TESTS)" -n 3 --dist loadfile $(ARGS)

# Which lines `make test` executes, in all processes that it starts. Slower than the tests alone.
coverage: setup
	rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest -m "$(QUICK_TESTS)" -n 3 --dist loadfile $(ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --sort=cover

# Tests that skip in .venv because a package is missing run here.
test-extras: $(EXTRAS_READY)
	PACELINE_REQUIRE_EXTRAS=1 $(EXTRAS_BIN)/python -m pytest -m "not slow and not gpu" $(EXTRAS_TESTS) $(ARGS)

# One at a time: they measure how fast a run recovers.
test-faults: setup
	$(BIN)/python -m pytest -m "faults" tests/faults $(ARGS)

# Proofs and long comparisons; three at a time, as above.
test-long: setup
	$(BIN)/python -m pytest -m "long" -n 3 --dist loadfile $(ARGS)

# Damaged files of every format; two formats at a time, each in a process of its own.
test-fuzz: setup
	FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest -m "fuzz" tests/fuzz -n 2 --dist load $(ARGS)

# One at a time: flows start processes of their own.
test-flows: $(FLOWS_READY)
	PACELINE_REQUIRE_FLOWS=1 $(FLOWS_BIN)/python -m pytest -m "flows and not slow" $(FLOWS_TESTS) $(ARGS)

# A warning is an error, for example a link to a missing page.
docs: $(DOCS_READY)
	@$(DOCS_BIN)/python docs/stage.py build/pages
	@$(DOCS_BIN)/zensical build --clean --strict
	@echo "open site/index.html; with search: $(PYTHON) -m http.server --directory site"

test-docs: setup $(DOCS_READY)
	$(BIN)/python -m pytest -m "docs" tests/docs $(ARGS)

# In a real Chromium, which tests/harness/install-browser installs on Debian and Ubuntu.
test-browser: setup $(DOCS_READY)
	$(BIN)/python -m pytest -m "browser" tests/reports tests/docs $(ARGS)

browser-install:
	@tests/harness/install-browser

# In a real terminal (tmux), and in the shells that have completion.
test-terminal: setup
	$(BIN)/python -m pytest -m "terminal" tests/cli $(ARGS)

terminal-install:
	@tests/harness/install-terminal

test-course: setup
	$(BIN)/python -m pytest -m "course" tests/tools/course -n 2 $(ARGS)

# Two guides at a time: an installation mostly waits and unpacks. Guides that share a clone are in one file.
test-guides: setup
	$(BIN)/python -m pytest -m "guides" tests/guides -n 2 --dist loadfile $(ARGS)

soak: setup
	$(BIN)/python benchmarks/soak.py --faults $(FAULTS) $(ARGS)

bench-cpu: $(BENCH_READY)
	$(BENCH_BIN)/python benchmarks/cpu.py $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

# One at a time: they wait for Slurm to notice lost nodes.
test-slurm: setup
	PACELINE_SLURM_DEADLINE_S=90 $(BIN)/python -m pytest -m "slurm" tests/integrations/slurm $(ARGS)

# SLURM_PACKAGES: more packages, for example nftables for the tests of the guide's firewalls.
slurm-install:
	@$(SLURM)/install $(SLURM_PACKAGES)

# With a test job: both nodes print their names.
slurm-up:
	@$(SLURM)/up $(SLURM_STATE) $(SLURM_SHAPE)
	@names=$$(SLURM_CONF=$(SLURM_STATE)/slurm.conf timeout 30 srun --nodes=2 --job-name=smoke hostname) \
		&& echo "up, and a job ran on:" $$(echo "$$names" | sort)
	@echo "next:    export SLURM_CONF=$(SLURM_STATE)/slurm.conf"
	@echo "         srun --nodes=2 hostname        (or: sbatch examples/slurm/cluster/first-job.sbatch)"
	@echo "the end: make slurm-down"

slurm-down:
	@$(SLURM)/down $(SLURM_STATE)
	@echo "down; nothing is left of it"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

check: lint type test

clean:
	rm -rf .venv .venv-extras .venv-flows .venv-bench .venv-docs site build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
