PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
ARGS ?=
SUPPORTED := import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit("fedrpc needs Python 3.11, 3.12 or 3.13, \
	and this is %d.%d; name another one: make setup PYTHON=python3.12" % sys.version_info[:2])

# pytest's exit code when ARGS, such as `-k ledger`, choose no test of one half. The end-to-end tests come after the
# others and one by one: they start processes and look at clocks.
NONE_CHOSEN := 5

.DEFAULT_GOAL := help
.PHONY: help setup demo test check checkov fmt protos catalog bench
MAKEFLAGS += --no-print-directory

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make .venv and install fedrpc with its pinned dependencies (PYTHON=python3.12 picks another Python)
	@:

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into .venv (the first time takes some minutes and 6 GB)"
	@test -x $(BIN)/pip || { $(PYTHON) -c '$(SUPPORTED)' && $(PYTHON) -m venv .venv; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## compare FedAvg and five methods on the embedded data, in a few minutes
	@$(BIN)/fedrpc compare --recipe demo $(ARGS)

test: setup ## run all tests (ARGS=--slow adds the slow ones)
	@$(BIN)/python -m pytest -q -n 2 --ignore=tests/e2e $(ARGS) || test $$? -eq $(NONE_CHOSEN)
	@$(BIN)/python -m pytest -q tests/e2e $(ARGS) || test $$? -eq $(NONE_CHOSEN)

check: setup ## lint, format, types, and generated code, all without changing a file
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --quiet --check
	@$(BIN)/mypy --strict fedrpc
	@$(BIN)/python protos/generate.py --check

checkov: .venv-checkov/bin/checkov ## install checkov, which the tests of deploy/ use when it is there
	@:

.venv-checkov/bin/checkov:
	@$(PYTHON) -m venv .venv-checkov
	@.venv-checkov/bin/python -m pip install --quiet --disable-pip-version-check 'checkov>=3.2,<4'

fmt: setup ## format, and fix what can be fixed
	@$(BIN)/ruff check --fix --quiet || true
	@$(BIN)/ruff format

protos: setup ## make fedrpc/wire/v2 anew from protos/
	@$(BIN)/python protos/generate.py

catalog: setup ## describe all methods, aggregators and models anew in fedrpc/catalog.json
	@$(BIN)/python -m fedrpc.cli.describe

bench: setup ## measure what has a goal, and show the table (ARGS="-k goodput" picks some, ARGS=--small only tries them)
	@$(BIN)/python -m pytest tests/bench -q -s --timeout=1800 $(ARGS)
