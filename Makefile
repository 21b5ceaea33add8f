# One command per gate, the same here and in CI.
PYTHON ?= python3
VENV   ?= .venv
TRAINING ?= .venv-training
BIN    := $(VENV)/bin
LOCKED := requirements
# What `make training` made trains the demo as well; else it gets a small environment of its own.
DEMO   := $(if $(wildcard $(TRAINING)/.installed),$(TRAINING),.venv-demo)

.PHONY: help install training demo test test-fast test-changed test-all campaign lint english format type walls check bench goldens docs engine-tables lock upgrade lock-check sbom audit clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(VENV)/.installed ## the daemon, into .venv (0.2 GB)

$(VENV)/.installed: pyproject.toml $(LOCKED)/build.txt $(LOCKED)/image.txt $(LOCKED)/daemon.txt
	@$(PYTHON) scripts/install.py daemon $(VENV)
	@touch $@

$(VENV)/.dev: $(VENV)/.installed $(LOCKED)/dev.txt
	@$(PYTHON) scripts/install.py dev $(VENV)
	@touch $@

$(VENV)/.bench: $(VENV)/.dev $(LOCKED)/bench.txt
	@$(PYTHON) scripts/install.py bench $(VENV)
	@touch $@

training: $(TRAINING)/.installed ## torch and Axolotl, into .venv-training (4 GB, 7 GB with CUDA)

$(TRAINING)/.installed: $(addprefix $(LOCKED)/,demo.txt games.txt training.txt triton.txt sources.txt torch-cpu.txt torch-cuda.txt)
	@$(PYTHON) scripts/install.py training $(TRAINING)
	@touch $@

demo: $(VENV)/.installed $(DEMO)/.installed ## train and publish a small model: no GPU, Docker, wallet or chain
	@TRAINER_PYTHON=$(abspath $(DEMO)/bin/python) $(BIN)/god-miner dev demo

.venv-demo/.installed: $(addprefix $(LOCKED)/,demo.txt torch-cpu.txt torch-cuda.txt)
	@$(PYTHON) scripts/install.py demo .venv-demo
	@touch $@

# A finished training environment: one that is named, the full one, or the demo's small one.
TESTS = @$(BIN)/python scripts/run_tests.py
WITH  = "$${GOD_MINER_TRAINING_PYTHON:-$(abspath $(patsubst %/.installed,%/bin/python,$(firstword $(wildcard $(TRAINING)/.installed .venv-demo/.installed))))}"

test: $(VENV)/.dev ## all that this machine can run, in minutes
	$(TESTS) test $(WITH)

test-fast: $(VENV)/.dev ## the tests that need no process, socket or torch: under 90 s
	$(TESTS) fast

test-changed: $(VENV)/.dev ## the tests of what differs from the last commit, or from BASE
	$(TESTS) changed $(WITH)

test-all: $(VENV)/.dev ## every test but the campaigns
	$(TESTS) all $(WITH)

campaign: $(VENV)/.dev ## faults at random instants; repeat one with GOD_MINER_SEED
	$(TESTS) campaign $(WITH)

lint: $(VENV)/.dev english ## ruff check and format, and the house's English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

english: ## docstrings, messages and pages against the house's list of forms
	@$(PYTHON) scripts/english.py

format: $(VENV)/.dev ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(VENV)/.dev ## mypy --strict
	$(BIN)/mypy

walls: $(VENV)/.dev ## who may import whom
	$(BIN)/lint-imports

check: lint type walls ## the gates, without the tests

bench: $(VENV)/.bench ## every measured claim, as tables
	$(BIN)/python -m benchmarks

goldens: $(VENV)/.dev ## compare with commit BASE= what this tree answers; ONLY= sections, BUT= fields that may differ
	@GOD_MINER_TRAINING_PYTHON=$(WITH) $(BIN)/python scripts/goldens.py against $(BASE) \
		$(if $(ONLY),--only $(ONLY)) $(if $(BUT),--but $(patsubst %,'%',$(BUT)))

docs: $(VENV)/.installed ## rewrite the generated pages and .env.example
	$(BIN)/python -m miner config env > .env.example
	$(BIN)/python -m miner.settings.reference docs/settings.md
	$(BIN)/python -m core.profile.docs docs/profiles.md
	$(BIN)/python -m miner.offers.policies.docs docs/policies.md
	$(BIN)/python scripts/alerts_page.py > docs/alerts.md
	$(BIN)/python scripts/commands_page.py > docs/commands.md
	$(BIN)/python scripts/api_page.py > docs/api.md

TABLE = $(2) scripts/engine_tables/$(1)_table.py $(3) > core/recipes/$(1)/table.json.new && mv core/recipes/$(1)/table.json.new core/recipes/$(1)/table.json

engine-tables: ## read the engines' keys again: Axolotl's, and sd-scripts' and ai-toolkit's from KOHYA= and AI_TOOLKIT=
	$(call TABLE,axolotl,$(WITH))
	$(if $(KOHYA),$(call TABLE,kohya,$(PYTHON),$(KOHYA)))
	$(if $(AI_TOOLKIT),$(call TABLE,ai_toolkit,$(PYTHON),$(AI_TOOLKIT)))

lock: ## write requirements/ from pyproject.toml, with hashes; versions that fit are kept
	$(PYTHON) scripts/lock.py write

upgrade: ## as lock, with the newest versions that are at least seven days old
	$(PYTHON) scripts/lock.py upgrade

lock-check: ## does plain PyPI serve what requirements/ says, all at least seven days old?
	$(PYTHON) scripts/lock.py check

sbom: ## list what is installed, as CycloneDX, in dist/
	$(PYTHON) scripts/sbom.py dist

audit: ## look for known vulnerabilities in requirements/
	$(PYTHON) scripts/audit.py

clean: ## remove the environments and the caches
	rm -rf $(VENV) $(TRAINING) .venv-demo .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
