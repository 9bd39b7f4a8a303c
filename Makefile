# make demo   set up, compare methods on streets a network was not trained for, write a page
# make check  set up, lint, type-check, the quick tests: two minutes
# make test   set up, lint, type-check, all tests
# make docs   set up, build the pages of docs/ into site/
# make fix    format and repair what can be repaired

PYTHON ?= python3
BIN := .venv/bin

.PHONY: all demo check test browser docs fix lint clean

all: test

# pip is told the versions the tests run with; a change of either file sets up anew.
.venv/done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat --editable '.[dev]'
	touch $@

demo: .venv/done
	$(BIN)/selfadapt demo -o demo --overwrite

# One thread for each of two workers: more would wait for each other.
check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

test: lint browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: .venv/done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# Tests that look at pages need a browser; without one they are skipped.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		(apt-get update -qq && apt-get install -y -qq chromium) >/dev/null 2>&1 || \
		echo "no browser could be installed: tests that need one are skipped"

docs: .venv/done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

fix: .venv/done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv demo site build *.egg-info
