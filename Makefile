# make run     set up, then train a small workload by strategies that plait picks (plait demo run)
# make test    set up, then ruff, mypy and the tests
# make bench   the benchmarks (quick)     make soak   the long fault loops     make clean
# make docs    the documentation as a site, in build/docs

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet install --constraint constraints.txt
NATIVE := $(wildcard native/*)

.PHONY: run test lint unit bench soak docs clean

run: $(VENV)/.run
	@$(BIN)/plait demo run

test: lint unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/python -m pytest -m "not soak" --numprocesses 3 --dist worksteal

bench: $(VENV)/.run
	$(BIN)/plait bench --quick

soak: $(VENV)/.test
	$(BIN)/python -m pytest -m soak --timeout 3600

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open build/docs/index.html"

$(VENV)/.venv: Makefile
	@echo "setting up $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plait needs Python 3.11 or later; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# The build tools are installed here, pinned, rather than in an isolated environment: the build then
# needs no second download, and torch never enters it.
$(VENV)/.run: $(VENV)/.venv pyproject.toml constraints.txt $(NATIVE)
	$(PIP) torch
	$(PIP) scikit-build-core nanobind cmake ninja
	$(PIP) --no-build-isolation --editable '.[hf]'
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) --no-build-isolation --editable '.[hf,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
