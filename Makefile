# The two commands to know: `make demo` and `make test`. Each makes the environment by itself, with pip and venv alone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REPORT := report.html
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

# One thread a process: the tests run in two processes, and results don't depend on the number of cores.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: demo test slow lint docs bench clean

demo: $(STAMP)
	$(BIN)/priory compare --data diabetes --report $(REPORT)
	@echo "The report is $(abspath $(REPORT))"

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# The tests that take long; continuous integration runs them too.
slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/docs
	@echo "The documents are $(abspath build/docs/index.html)"

bench: $(STAMP)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# What make made, except the environment: that one is `rm -rf .venv`.
clean:
	rm -rf build dist $(REPORT) .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks experiments docs -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first, through the constraints, so that no later package chooses another one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt torch
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@
