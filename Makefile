# Everything is installed into .venv, beside this file.
PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help install train test test-all test-ranks test-gpu lint docs clean

help:  ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

install: .venv/installed  ## install into .venv; TORCH=torch==X.Y.Z chooses the torch

train: install  ## train the first recipe on this machine's CPU
	@.venv/bin/lightning-distrec fit --config recipes/movielens_dlrm/cpu.yaml

# Tests start several ranks on one machine. One thread each keeps them from fighting over the cores, and sums in one order.
# Training needs no such line: Lightning divides the cores among the ranks by itself.
# Ranks wait for each other: three tests at a time keep two cores busy.
test test-all: export OMP_NUM_THREADS ?= 1
# They start programs, each of which would compile the package where nothing may be written.
unexport PYTHONDONTWRITEBYTECODE
# A worker that dies fails the run: xdist would run the test that has killed it again and again.
PYTEST = .venv/bin/python -m pytest -q --numprocesses=$(WORKERS) --max-worker-restart=0 --instafail --durations=10
WORKERS ?= 3
test: install lint  ## check style and types, then run the quick tests; WORKERS=N runs N at a time
	@$(PYTEST)

test-all: install lint  ## check style and types, then run all tests
	@$(PYTEST) -m ""

test-ranks: export OMP_NUM_THREADS ?= 1
test-ranks: install  ## start, kill and resume 64 ranks on this machine; RANKS=N chooses another number
	@RANKS_OF_TEST=$(RANKS) .venv/bin/python -m pytest -q -m "" --instafail --durations=1 tests/cluster/test_many_ranks.py
RANKS ?= 64

test-gpu: install  ## run the tests that need a GPU; where there is none, say so
	@.venv/bin/python -m tests.gpu

lint: install  ## check style (ruff) and types (mypy)
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --quiet --check . || { echo "Run: .venv/bin/ruff format ."; exit 1; }
	@.venv/bin/mypy

docs: install  ## build the documentation's site into site/; broken links and lists, and wide code, are errors
	@.venv/bin/python -m tests.docs.readable
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "Built: site/index.html"

clean:  ## remove .venv, caches and training outputs; downloaded data stays
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info outputs lightning_logs
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

PIP = .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check --no-input
VERSIONS = .venv/bin/python lightning_distrec/versions.py

# The stamp holds the TORCH and FBGEMM that it was written with: other ones install again, none keep what is there.
ifneq ($(strip $(TORCH) $(FBGEMM)),)
ifneq ($(strip $(TORCH) $(FBGEMM)),$(strip $(shell cat .venv/installed 2>/dev/null)))
.venv/installed: FORCE
endif
endif

# The order matters. torch comes first, since the others are chosen by its version and build, and is named again, so that
# pip keeps it. fbgemm and torchrec come last and without dependencies: torchrec's metadata ask for fbgemm-gpu even on a
# CPU and for torchmetrics 1.0.3, which it does not need, and while it is installed pip reports both in red at each call.
.venv/installed: .venv/bin/pip pyproject.toml lightning_distrec/versions.py
	@set -e; torch=$$($(VERSIONS) torch "$(TORCH)"); rm -f $@; \
	echo "Installing $$torch (TORCH=torch==X.Y.Z chooses another). A CUDA build downloads several GB."; \
	$(PIP) uninstall -y torchrec; \
	$(PIP) install $$torch; \
	torch=$$($(VERSIONS) torch); matching=$$($(VERSIONS) matching "$(FBGEMM)"); \
	echo "Installing lightning_distrec and its dependencies."; \
	$(PIP) install --editable '.[recipes,test]' $$torch; \
	echo "Installing $$matching."; \
	$(PIP) uninstall -y fbgemm-gpu fbgemm-gpu-cpu; \
	$(PIP) install --no-deps $$matching; \
	echo $(TORCH) $(FBGEMM) > $@; \
	echo "Installed into .venv: $$torch $$matching."

.PHONY: FORCE
FORCE:

# pip comes last into a new environment, so one that was interrupted half-way is made again.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make install PYTHON=python3.12")'
	@echo "Making .venv with $(PYTHON)."
	@$(PYTHON) -m venv .venv
