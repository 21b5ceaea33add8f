# One command per gate, the same here and in CI.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check

.PHONY: help install demo test lint format type walls check bench lock clean

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

demo: $(VENV)/.installed ## the main job on embedded defaults: no GPU, Docker, wallet or chain
	@$(BIN)/god-miner dev demo

test: $(VENV)/.dev ## every test
	$(BIN)/python -m pytest

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

lock: ## rewrite constraints.txt from what the resolver picks today
	sh scripts/lock.sh $(PYTHON)

clean: ## forget the environment and the caches
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
