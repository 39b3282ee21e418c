# Each target can be the first command on a fresh machine that has make and python3 (3.11 or newer, with venv).
# The package is installed, editable and with its development tools, into $(VENV), and again only when its metadata change.
PYTHON ?= python3
VENV ?= .venv
OUTPUT ?= runs/quickstart
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.raptor_hf-installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install quickstart test test-slow check bench cards

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '%-12s %s\n' "$$name" "$$text"; done
	@printf '\nPYTHON=python3.12 chooses the interpreter, VENV=DIR the environment, OUTPUT=DIR the quickstart folder;\n'
	@printf 'ARGS=... adds arguments, as in: make quickstart ARGS=--overwrite\n'

install: $(STAMP) ## make .venv and install the package with its development tools

quickstart: $(STAMP) ## digits, offline: teacher, phases, Raptors, probe, report in runs/quickstart
	$(BIN)/raptor-hf quickstart --output-dir $(OUTPUT) $(ARGS)

test: $(STAMP) ## the test suite on two processes, without the slow tests and without network
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

test-slow: $(STAMP) ## the slow tests only: runs killed ten times
	$(BIN)/python -m pytest -q -m slow $(ARGS)

check: $(STAMP) ## lint, formatting, types, layering, README tree
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest -q tests/test_layering.py tests/test_repository.py

bench: $(STAMP) ## time forward pass, training step, activation cache and flow beside their alternatives, an hour on two cores
	for name in inference training_step activation_cache dynamics; do $(BIN)/python benchmarks/$$name.py --output runs/$$name.json $(ARGS) || exit 1; done

cards: $(STAMP) ## render the cards in model_cards from the recorded results
	for name in raptor-k2 raptor-k3; do $(BIN)/raptor-hf card model_cards/$$name --results examples/quickstart $(ARGS) || exit 1; done
	for folder in model_cards/dinov2-*/; do $(BIN)/raptor-hf card $$folder $(ARGS) || exit 1; done

$(STAMP): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "raptor_hf needs Python 3.11 or newer, $(PYTHON) is older or missing; try: make PYTHON=python3.11"; exit 1; }
	@echo "Installing raptor_hf and its development tools into $(VENV), a few minutes the first time ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@
