# make demo   set up, adapt a network to images it was not trained for, write a report
# make test   set up, lint, type-check, all tests
# make fix    format and repair what can be repaired

PYTHON ?= python3
BIN := .venv/bin

.PHONY: all demo test fix lint clean

all: test

# pip is told the versions the tests run with; a change of either file sets up anew.
.venv/done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat --editable '.[dev]'
	touch $@

demo: .venv/done
	$(BIN)/selfadapt demo -o demo --overwrite

test: lint
	$(BIN)/python -m pytest -n 2

lint: .venv/done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

fix: .venv/done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv demo build *.egg-info
