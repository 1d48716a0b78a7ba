# Everything is installed into .venv, beside this file.
PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help install train test test-all lint docs clean

help:  ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

install: .venv/bin/pip  ## install into .venv; TORCH=torch==X.Y.Z chooses the torch
	@.venv/bin/python lightning_distrec/versions.py install

train: install  ## train the first recipe on this machine's CPU
	@.venv/bin/lightning-distrec fit --config recipes/movielens_dlrm/cpu.yaml

# Tests start several ranks on one machine. One thread each keeps them from fighting over the cores, and sums in one order.
# Training needs no such line: Lightning divides the cores among the ranks by itself.
# Ranks wait for each other: three tests at a time keep two cores busy.
test test-all: export OMP_NUM_THREADS ?= 1
PYTEST = .venv/bin/python -m pytest -q --numprocesses=$(WORKERS) --instafail --durations=10
WORKERS ?= 3
test: install lint  ## check style and types, then run the quick tests; WORKERS=N runs N at a time
	@$(PYTEST)

test-all: install lint  ## check style and types, then run all tests
	@$(PYTEST) -m ""

lint: install  ## check style (ruff) and types (mypy)
	@.venv/bin/ruff check .
	@.venv/bin/mypy

docs: install  ## build the documentation's site into site/; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "Built: site/index.html"

clean:  ## remove .venv, caches and training outputs; downloaded data stays
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info outputs lightning_logs
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip comes last into a new environment, so one that was interrupted half-way is made again.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make install PYTHON=python3.12")'
	@echo "Making .venv with $(PYTHON)."
	@$(PYTHON) -m venv .venv
