# Everything works from a fresh clone: the first target that needs it makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# One thread each: results do not depend on the machine's load, and two processes do more than one of two threads.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline

.PHONY: setup demo test test-slow check format clean help
help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(STAMP)  ## make .venv with everything needed to use and develop LMM4Edit

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "LMM4Edit needs Python 3.11 or newer, $(PYTHON) is older or missing. Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "set-up 1/3: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "set-up 2/3: installing PyTorch (large: some minutes the first time)"
	@$(PIP) install "torch>=2.6" "torchvision>=0.21"
	@echo "set-up 3/3: installing LMM4Edit and the tools to develop it"
	@$(PIP) install --editable ".[dev]"
	@touch $(STAMP)
	@echo "set-up done: $(BIN)/lmm4edit, or 'source $(BIN)/activate'"

demo: $(STAMP)  ## train a judge in two stages on a small benchmark and write a report
	$(BIN)/lmm4edit demo

test: $(STAMP)  ## the default tests, under 12 minutes
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile tests

test-slow: $(STAMP)  ## real launches, kills and several processes
	$(TEST_ENV) $(BIN)/python -m pytest -q -m slow tests

check: $(STAMP)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove runs and caches, keep .venv
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
