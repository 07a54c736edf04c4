# make setup | test | demo | lint | bench | conformance | zoo | clean
# Other versions: make setup TORCH=2.13.0 VISION=   (an empty VISION: no torchvision, nor what needs it)

TORCH   ?= 2.14.1
VISION  ?= 0.29.1
JAX     ?= 0.10.2
WORKERS ?= 2
ARGS    ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Processes that the tests start load what others have compiled.
unexport PYTHONDONTWRITEBYTECODE

# The first Python that is at least 3.11 (a pyenv shim exists for versions that do not run).
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)

VENV  := .venv
PY    := $(VENV)/bin/python
DISTS := $(patsubst %/pyproject.toml,%,$(wildcard torchax_*/pyproject.toml plugins/*/pyproject.toml))
DISTS := $(if $(VISION),$(DISTS),$(filter-out torchax_ops_vision,$(DISTS)))
STAMP := $(VENV)/.setup-torch$(TORCH)-vision$(VISION)-jax$(JAX)
SOURCES := $(wildcard torchax_*/src plugins/*/src)
CODE  := $(SOURCES) $(wildcard tests examples benchmarks)

# $(call timed,name,command): run it, and say how long it took.
timed = { started=$$SECONDS; $(2); echo "-- $(1): $$((SECONDS - started)) s"; }

.PHONY: help setup test demo lint format bench conformance zoo clean

help:
	@grep -E '^# make|^# Other' Makefile | cut -c3-

setup: $(STAMP)

$(STAMP): pyproject.toml $(DISTS:%=%/pyproject.toml)
	@test -n "$(PYTHON)" || { echo "make setup needs Python 3.11 or newer on the PATH (or PYTHON=/path/to/python)"; exit 1; }
	@test -x $(PY) || $(call timed,create $(VENV),$(PYTHON) -m venv $(VENV))
	@$(if $(VISION),,$(PY) -m pip uninstall -qq --yes torchax-ops-vision timm torchvision)
	@$(call timed,pip,$(PY) -m pip install --quiet --upgrade "pip>=25.1" "setuptools>=77" wheel)
	@$(call timed,install,$(PY) -m pip install --quiet --no-build-isolation \
	    torch==$(TORCH) $(if $(VISION),torchvision==$(VISION)) jax==$(JAX) jaxlib==$(JAX) \
	    --group dev $(if $(VISION),--group vision) $(DISTS:%=-e ./%))
	@rm -f $(VENV)/.setup-*
	@touch $@

test:
	@$(call timed,setup,$(MAKE) setup)
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

demo: setup
	@$(PY) examples/digits_cnn.py $(ARGS)

lint: setup
	@$(call timed,ruff check,$(VENV)/bin/ruff check $(CODE))
	@$(call timed,ruff format,$(VENV)/bin/ruff format --check $(CODE))
	@$(call timed,mypy,$(VENV)/bin/mypy $(SOURCES))

format: setup
	@$(VENV)/bin/ruff check --fix $(CODE)
	@$(VENV)/bin/ruff format $(CODE)

bench: setup
	@for script in startup eager model train; do $(PY) benchmarks/$$script.py $(ARGS); done

conformance: setup
	@$(PY) -m torchax_core.testing --workers $(WORKERS) --json build/conformance.json --html build/conformance.html $(ARGS)

zoo: setup
	@mkdir -p build
	@$(PY) tests/models/zoo.py --json build/zoo.json $(ARGS)

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
