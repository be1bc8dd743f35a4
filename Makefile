# `make demo`, `make test`, and `make test-all` for the long campaigns too. Each makes its own virtual environment in .venv;
# `make test-newest` makes one with the newest torch that the registry has, in .venv-newest.
# Tests run in two processes more than there are cores, since many wait for ranks: `make test WORKERS=0` runs them one after
# the other, and `make test ORDER=random` in another order each time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEWEST := .venv-newest
STAMP := $(VENV)/installed
DEMO := $(VENV)/installed-for-demo
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 2)
ORDER ?= usual
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(if $(filter random,$(ORDER)),-p randomly)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-newest campaigns lint docs types clean

$(DEMO): pyproject.toml constraints.txt
	@echo "Installing torch and what the demo needs into $(VENV); this takes some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e ".[demo]"
	touch $(DEMO)

$(STAMP): $(DEMO)
	@echo "Installing what development needs into $(VENV)."
	$(INSTALL) -e ".[dev]"
	touch $(STAMP)

demo: $(DEMO)
	$(BIN)/python examples/demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/unit/test_words.py

test: lint
	$(PYTEST)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html"

types: $(STAMP)
	$(BIN)/python -m tests.helpers.stubs

test-newest:
	@echo "Installing the newest torch into $(NEWEST): several GB, as the registry's build brings CUDA."
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade torch -e ".[dev]"
	$(NEWEST)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal

campaigns: $(STAMP)
	$(PYTEST) --campaigns tests

test-all: test campaigns

clean:
	rm -rf $(VENV) $(NEWEST) log demo-run
