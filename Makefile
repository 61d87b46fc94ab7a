PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help install quickstart test check bench clean

help:
	@echo "make quickstart   install into .venv and train the tic-tac-toe player (about 3 minutes)"
	@echo "make test         install what the tests need and run them"
	@echo "make check        lint, formatting and types"
	@echo "make bench        measure side by side and write benchmarks/RESULTS.md"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "needs $(PYTHON); name another with: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: any release but the pinned one pulls gigabytes of GPU packages.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) -c constraints.txt torch
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(PIP) -c constraints.txt -e '.[local]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --target $(VENV)/openai2 --upgrade --no-deps 'openai<3'  # the release that stands on httpx; see test_capture
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed

quickstart: $(VENV)/.installed
	$(BIN)/insitu finetune --config_file examples/tic_tac_toe/grpo.yml

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
