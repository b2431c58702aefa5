PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PROTOS_STAMP := .venv-protos/.installed
ARGS ?=
SUPPORTED := import sys; (3, 11) <= sys.version_info < (3, 15) or sys.exit("fedrpc needs Python 3.11 to 3.14, \
	and this is %d.%d; name another one: make setup PYTHON=python3.12" % sys.version_info[:2])

# pytest's exit code when ARGS, such as `-k ledger`, choose no test of one half. The end-to-end tests come after the
# others, and a file's tests stay together: they share runs that take long.
NONE_CHOSEN := 5

.DEFAULT_GOAL := help
.PHONY: help setup demo test check checkov browser huggingface fmt protos catalog docs bench gpu-check matrix trackers
MAKEFLAGS += --no-print-directory

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

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
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/e2e $(ARGS) || test $$? -eq $(NONE_CHOSEN)

check: setup $(PROTOS_STAMP) ## lint, format, types, and generated code, all without changing a file
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --quiet --check
	@$(BIN)/mypy --strict fedrpc
	@.venv-protos/bin/python protos/generate.py --check

checkov: .venv-checkov/bin/checkov ## install checkov, which the tests of deploy/ use when it is there
	@:

.venv-checkov/bin/checkov:
	@$(PYTHON) -m venv .venv-checkov
	@.venv-checkov/bin/python -m pip install --quiet --disable-pip-version-check 'checkov>=3.2,<4'

browser: setup ## install what the tests of the live page use: Playwright, and Debian's Chromium where that is possible
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'playwright>=1.50,<2' || echo "no Playwright: its tests skip"
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq >/dev/null && \
		apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1; } || \
		echo "no Chromium: tests of pages skip; install it, such as by: sudo apt-get install chromium"

huggingface: setup ## install Hugging Face's datasets, which the tests of importing use when it is there
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,huggingface]'

fmt: setup ## format, and fix what can be fixed
	@$(BIN)/ruff check --fix --quiet || true
	@$(BIN)/ruff format

protos: $(PROTOS_STAMP) ## make fedrpc/wire/v2 anew from protos/
	@.venv-protos/bin/python protos/generate.py

$(PROTOS_STAMP): protos/requirements.txt
	@test -x .venv-protos/bin/pip || $(PYTHON) -m venv .venv-protos
	@.venv-protos/bin/python -m pip install --quiet --disable-pip-version-check -r protos/requirements.txt
	@touch $@

catalog: setup ## describe all methods, aggregators and models anew in fedrpc/catalog.json
	@$(BIN)/python -m fedrpc.cli.describe

docs: setup ## build the site into site/; a broken link fails it
	@$(BIN)/python -m docs.build
	@echo "site/index.html"

bench: setup ## measure what has a goal, and show the table (ARGS="-k goodput" picks some, ARGS=--small only tries them)
	@$(BIN)/python -m pytest tests/bench -q -s --timeout=1800 $(ARGS)

matrix: setup ## test the oldest and newest dependencies, and Flower beside fedrpc, in environments of their own
	@$(BIN)/python -m tests.matrix $(ARGS)

trackers: setup ## test TensorBoard, MLflow and W&B, in an environment of their own
	@$(BIN)/python -m tests.matrix trackers

gpu-check: setup ## on a machine with a GPU: every method there and on the CPU, throughput, and the tests marked cuda
	@code=0; $(BIN)/fedrpc gpu-check $(ARGS) || code=$$?; $(BIN)/python -m pytest -q -m cuda tests || code=$$?; exit $$code
