# Every target sets itself up: a virtual environment in .venv, pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU_WORKERS ?= 8
RECEIPT := tests/gpu_receipt.json
# One thread a test process: two processes of many threads each fight over two cores. Bytecode is kept even if the
# environment says otherwise: without it, each of the processes that tests start compiles all that it imports.
SINGLE := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# Whole files go to the processes, in the order of tests/conftest.py: the longest first. GPU tests run on the reference.
WHOLE := $(SINGLE) $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --device cpu

.PHONY: help setup demo test record quick lint format typecheck gpu-test bench freeze clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

setup: $(READY)  ## create .venv and install everything pinned

demo: $(READY)  ## real text through a real model whose attention is ours
	$(BIN)/cuteflash demo

test: lint typecheck  ## everything that needs no GPU
	$(WHOLE)
	@$(BIN)/python -m tests.receipt check $(RECEIPT)

record: $(READY)  ## after a change of device code: all tests, then tests/kernels.json, which spares others compilations
	$(WHOLE) --record

quick: $(READY)  ## while developing: the tests that are not marked slow
	$(SINGLE) $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu and not slow"

lint: $(READY)  ## ruff, check only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## ruff, fixing
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(READY)  ## mypy --strict on the plain-Python layers
	$(BIN)/mypy

gpu-test: $(READY)  ## the GPU tests; writes tests/gpu_receipt.json
	$(BIN)/python -m pytest -q -n $(GPU_WORKERS) -m gpu --receipt $(RECEIPT) tests/gpu

bench: $(READY)  ## the forward benchmark on this GPU; writes benchmarks/results/
	mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.forward --json benchmarks/results/forward.json --plot benchmarks/results/forward.png

freeze: $(READY)  ## rewrite constraints.txt from .venv
	{ head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/^torch==\([0-9.]*\)+.*/torch==\1/'; } > constraints.new
	mv constraints.new constraints.txt

clean:  ## remove build and tool caches (not .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find cuteflash benchmarks examples layouts tests -name __pycache__ -type d -prune -exec rm -rf {} +
