# `make mnist` trains on two ranks, `make test` runs the tests. Both make .venv and may be run again.
# Paths are relative and quoted, so a folder whose name has a space is fine.
SHELL := /bin/sh
PYTHON ?= python3
BIN := .venv/bin
NPROC ?= 2
TESTS ?=
MNIST ?=

.PHONY: help mnist test lint types wheel clean

help:
	@echo 'make mnist   train on handwritten digits on $(NPROC) ranks (NPROC=4, MNIST="--data fashion ..." to change)'
	@echo 'make test    run the tests (TESTS=tests/dist/test_plan.py for a part)'
	@echo 'make lint    ruff'
	@echo 'make types   build a wheel, install it elsewhere, check its types with mypy --strict'
	@echo 'make clean   remove .venv and build output'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 10) else "phalanx needs Python 3.10 or newer, and $(PYTHON) is %d.%d.\nFix: make PYTHON=/path/to/python3.12 ..." % v)'
	$(PYTHON) -m venv .venv || { echo 'Fix: install the venv module (Debian and Ubuntu: apt install python3-venv)' >&2; rm -rf .venv; exit 1; }

# A stamp is written last, so that an interrupted installation is taken up again.
.venv/recipes.stamp: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[recipes,torchvision]'
	@touch $@

.venv/dev.stamp: setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@ .venv/recipes.stamp

mnist: .venv/recipes.stamp
	$(BIN)/python -m phalanx run --nproc-per-node $(NPROC) mnist $(MNIST)

test: .venv/dev.stamp
	$(BIN)/python -m pytest $(TESTS)

lint: .venv/dev.stamp
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

wheel: .venv/dev.stamp
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .

types: wheel
	$(BIN)/python -m pip install --quiet --no-deps --target build/site build/wheel/*.whl
	MYPYPATH=build/site $(BIN)/python -m mypy -p phalanx

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache
