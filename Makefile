# Two commands for a newcomer: `make demo` runs the main job, `make test` passes the tests. Both install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SPEC ?= specs/gemma4_nano.yaml
# --no-compile: what is imported is compiled then; compiling all of torch and transformers beforehand takes 50 seconds.
# One thread per process: two on two cores wait for each other. A file stays on one worker: its fixtures and children serve all of it.
TEST := OMP_NUM_THREADS=1 $(BIN)/pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check schema record lint types contracts drift clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s ':'

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -e . -c constraints.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -e '.[test,dev]' -c constraints.txt
	@touch $@

demo: $(VENV)/.core ## run specs/gemma4_nano.yaml and write its record under docs/benchmark_results/
	$(BIN)/harness run $(SPEC)

test: $(VENV)/.dev ## the tests and the nano spec, without what is marked slow (minutes)
	$(TEST) -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/.dev ## everything, also what is marked slow
	$(TEST)

check: lint types contracts drift ## lint, types, import contracts, schema drift, record drift

drift: $(VENV)/.core
	$(BIN)/harness check --strict specs/*.yaml
	$(BIN)/harness schema --check
	$(BIN)/harness report --check

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

schema: $(VENV)/.core ## write specs/spec.schema.json and the tables generated from the code
	$(BIN)/harness schema

record: $(VENV)/.core ## render every record's page again from its raw lines
	$(BIN)/harness report

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build
