# Two commands do all the set-up: `make demo` and `make test`. Everything is installed once, into .venv.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Python keeps what it has compiled, also where the shell says no: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

# Two files of tests run at a time, each with ranks of its own. Those that are watched by the clock follow, one by one.
ALONE = $(shell grep -rl --include='test_*.py' 'mark[.]alone' tests)
both = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m '$(1)not alone'; first=$$?; \
	$(BIN)/python -m pytest -m '$(1)alone' $(ALONE); second=$$?; test $$first -eq 0 && test $$second -eq 0

# In CI the tests of the pages need a browser; elsewhere they are skipped without one.
NEEDS_BROWSER = $(if $(filter-out 0 false,$(CI)),browser)

.PHONY: demo test test-all browser parity faults reliability check numbers docs clean help

help:
	@echo "make demo      measure, plan, verify, train and report on this machine (a minute)"
	@echo "make test      the quick tests"
	@echo "make check     lint, format and types (ruff, mypy)"
	@echo "make test-all  all tests, also the slow ones"
	@echo "make browser   install Debian's chromium, for the tests of the pages (as root)"
	@echo "make parity    the whole parity matrix, an hour; a part: make parity ARGS='--jobs gpt --ranks 2'"
	@echo "make faults    every kind of fault in every place of a run, half an hour; a part: ARGS='--plans dp'"
	@echo "make reliability  what must hold, line by line, with its tests; a part: make reliability ARGS='C S --collect'"
	@echo "make docs      the pages as a site, into build/docs"
	@echo "make numbers   paste fresh numbers into the README"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Drumline needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,quality]'
	@# MPICH's files have the names of Open MPI's, so it stands aside, for the tests
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --prefix .venv/mpich mpich
	@touch $@

demo: $(STAMP)
	@$(BIN)/drumline demo

test: $(STAMP) $(NEEDS_BROWSER)
	@$(call both,not slow and )

test-all: $(STAMP) $(NEEDS_BROWSER)
	@$(call both,)

browser:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq -y --no-install-recommends chromium fonts-liberation >/dev/null || \
		echo "no browser, and apt-get cannot install one: the tests of the pages will fail in CI"

parity: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python tests/runtime/matrix.py $(ARGS)

faults: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python tests/launchers/fault_matrix.py $(ARGS)

reliability: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python tests/reliability_table.py $(ARGS)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(STAMP)
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

numbers: $(STAMP)
	@$(BIN)/python docs/paste_numbers.py

clean:
	rm -rf .venv runs build dist
