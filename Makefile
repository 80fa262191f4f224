# `make demo` and `make test` install what they need into .venv and then run; nothing else is required.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check bench soak gpu install clean

demo: install
	$(BIN)/transload demo

test: check
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	$(BIN)/transload bench

# On a machine with a GPU: correctness, then ratios to the driver's copies.
gpu: install
	$(BIN)/python -m pytest -q -s -m gpu tests

soak: install
	$(BIN)/transload soak --trials 300

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,demo,test]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
