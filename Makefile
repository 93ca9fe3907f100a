# make demo: answers over documents, full prefill beside fused prefill · make test: the test suite
# The first call makes .venv and installs into it; later ones start at once until pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: help demo test lint types layers clean

help:
	@echo "make demo | test | lint | types | layers | clean"

demo: $(VENV)/.installed
	$(RUN) examples/answer_over_documents.py $(DEMO_ARGS)

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.installed-dev
	$(RUN) -m mypy

layers: $(VENV)/.installed-dev
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/kvweave.egg-info

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(INPUTS) | $(VENV)/bin/pip
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(INPUTS) | $(VENV)/bin/pip
	$(INSTALL) -e '.[dev]'
	touch $(VENV)/.installed $@
