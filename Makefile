# `make demo`, `make test`, and `make test-all` for the long campaigns too. Each makes its own virtual environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DEMO := $(VENV)/installed-for-demo
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all campaigns lint clean

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

test: lint
	$(BIN)/python -m pytest

campaigns: $(STAMP)
	$(BIN)/python -m pytest tests/campaigns

test-all: test campaigns

clean:
	rm -rf $(VENV) log demo-run
