# Everything runs in .venv, which the first target that needs it makes.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
COMPILED := $(VENV)/.compiled
LOOPS := $(shell find src/bireme/codec src/bireme/placement benchmarks/placers -name "*.py")

.PHONY: help setup train test test-fast test-all lint docs bench bench-stale gpu clean

help:
	@echo "make setup      create .venv and install Bireme with its development tools"
	@echo "make train      train a small language model over a pipeline on this machine"
	@echo "make test       all tests          make test-fast   the fast core (1 min)"
	@echo "make test-all   all tests, property tests with all their cases (an hour; for the night)"
	@echo "make lint       ruff, mypy --strict, import contracts"
	@echo "make docs       the documentation as a site, in build/site"
	@echo "make bench      the benchmarks of docs/benchmarks.md"
	@echo "make bench-stale  the sections of docs/benchmarks.md whose figures are of old code"
	@echo "make gpu        tests, training and benchmarks on this machine's GPUs, into docs/gpu.md"
	@echo "make clean      remove .venv and caches"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Bireme needs Python 3.11 or newer; set one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: setup
	$(BIN)/bireme train

# Numba keeps what it compiles next to the source, so that no worker of the tests has to compile. In another
# folder, or after a change, it compiles again.
$(COMPILED): $(READY) $(LOOPS)
	@echo "compiling loops, once"
	@$(BIN)/python -m tests.support.compile_loops > /dev/null 2>&1 || true
	@touch $@

# A worker that has no tests left takes some from the others. All tests get one worker more than there are
# cores, because some of them wait. Those of the fast core do not wait, and each worker takes seconds to start.
PYTEST := $(BIN)/python -m pytest --dist worksteal
CORES := $$(getconf _NPROCESSORS_ONLN)
MORE := $$(( $(CORES) + 1 ))

# Loops compile beside the template of the workers, which takes one core as long before the first test begins.
test: setup
	@$(MAKE_COMMAND) --no-print-directory $(COMPILED) & \
		$(PYTEST) -n $(MORE); status=$$?; wait; exit $$status

test-fast: setup
	BIREME_TESTS=few $(PYTEST) -n $(CORES) -m "not slow"

test-all: $(COMPILED)
	BIREME_TESTS=all $(PYTEST) -n $(MORE)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

# Each takes --quick for a smoke run and --json for one document with its rows and verdicts. Above its tables it
# prints the line with date and commit that belongs above them on the page.
bench: setup
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/profiles.py
	$(BIN)/python benchmarks/partition.py
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/published.py
	$(BIN)/python benchmarks/tiers.py
	$(BIN)/python benchmarks/shared_weights.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/placement.py
	$(BIN)/python benchmarks/batch_end.py
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/balance.py
	$(BIN)/python benchmarks/agreement.py
	$(BIN)/python benchmarks/kills.py
	$(BIN)/python benchmarks/churn.py
	$(BIN)/python benchmarks/fuzz.py
	$(BIN)/python benchmarks/home_lab.py
	$(BIN)/python benchmarks/leakage.py
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/convergence.py
	$(BIN)/python benchmarks/codec_speed.py
	$(BIN)/python benchmarks/links.py
	$(BIN)/python benchmarks/sums.py
	$(BIN)/python benchmarks/diloco.py
	$(BIN)/python benchmarks/principal.py
	$(BIN)/python benchmarks/recommender.py
	$(BIN)/python benchmarks/race.py --quick

bench-stale: setup
	$(BIN)/python -m benchmarks.common.made

# It finds its own Python, for the environment above has a torch for CPUs, and needs nothing but this one.
gpu:
	@$(PYTHON) benchmarks/gpu.py

clean:
	rm -rf $(VENV) .venv-gpu .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
