# make demo, make test: both build .venv first; nothing else is needed but Python, pip and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH ?= torch==2.13.0
DSL ?= nvidia-cutlass-dsl==4.8.1
EXTRAS ?= dev,peer
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint format pages clean

demo: $(STAMP)
	$(BIN)/python examples/attention.py

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -q $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

pages: $(STAMP)
	$(BIN)/python -m fa_cute pages docs/kernels --table README.md

clean:
	rm -rf $(VENV) out .pytest_cache .ruff_cache

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fa_cute needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): torch and the DSL, some minutes the first time"
	$(BIN)/python -m pip install --quiet "$(TORCH)" "$(DSL)" -e ".[$(EXTRAS)]"
	touch $@
