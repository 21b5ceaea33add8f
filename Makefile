# One command per gate, the same here and in CI.
PYTHON ?= python3
VENV   ?= .venv
TRAINING ?= .venv-training
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check

.PHONY: help install training demo test lint format type walls check bench docs lock lock-check clean

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed ## the daemon and all the demo needs, into .venv

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "god-miner needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) install -q -c constraints.txt -e '.[dev,bench]'
	@touch $@

training: $(TRAINING)/.installed ## the training stack, in an environment of its own (4 GB): for plans held against the real engine

# torch first and alone: axolotl's own range would fetch another build of it.
$(TRAINING)/.installed: constraints-training.txt
	$(PYTHON) -m venv $(TRAINING)
	$(TRAINING)/bin/pip install -q --disable-pip-version-check torch==2.13.0
	$(TRAINING)/bin/pip install -q --disable-pip-version-check -c constraints-training.txt axolotl==0.19.0
	@touch $@

demo: $(VENV)/.installed ## the main job on embedded defaults: no GPU, Docker, wallet or chain
	@$(BIN)/god-miner dev demo

test: $(VENV)/.dev ## every test; those of the training stack where `make training` has run
	@sh scripts/test.sh $(BIN) "$${GOD_MINER_TRAINING_PYTHON:-$(abspath $(wildcard $(TRAINING)/bin/python))}"

lint: $(VENV)/.dev ## ruff check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(VENV)/.dev ## mypy --strict on core and miner
	$(BIN)/mypy

walls: $(VENV)/.dev ## who may import whom
	$(BIN)/lint-imports

check: lint type walls ## the gates, without the tests

bench: $(VENV)/.bench ## every measured claim, as tables
	$(BIN)/python -m benchmarks

docs: $(VENV)/.installed ## rewrite the generated pages: settings, profiles, policies, .env.example
	$(BIN)/god-miner config env > .env.example
	$(BIN)/god-miner config docs > docs/settings.md
	$(BIN)/python -m core.profile.docs docs/profiles.md
	$(BIN)/python -m miner.offers.policies.docs docs/policies.md
	$(BIN)/python scripts/commands_page.py > docs/commands.md

lock: ## resolve both constraint files anew, for plain PyPI, without installing
	$(PYTHON) scripts/lock.py write

lock-check: ## whether all that the Makefile and the Dockerfiles install resolves on plain PyPI
	$(PYTHON) scripts/lock.py check

clean: ## forget the environment and the caches
	rm -rf $(VENV) $(TRAINING) .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
