# `make help` lists what there is. Everything installs into .venv on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
REQUIREMENTS ?= $(if $(HAS_GPU),requirements/cuda13.txt,requirements/cpu.txt)
BASELINES := $(filter-out requirements/cpu.txt requirements/cuda13.txt,$(wildcard requirements/*.txt))
STAMP := $(VENV)/.installed
# Of pyproject.toml; with browser too, the page's tests run where Chromium and its driver are.
EXTRAS ?= dev
export MPLBACKEND := Agg
# Python compiles what is imported when it is imported first, which of thousands of installed files are few, and keeps it
# whatever the shell says: sweeps and tests start many processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help reproduce test check smoke regress plots report baselines clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

$(STAMP): $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off --no-compile \
	  -r $(REQUIREMENTS) -e '.[$(EXTRAS)]'
	@touch $@

baselines: $(STAMP)  ## install the baselines' packages on a GPU node, one by one; a failure is reported and stops nothing
	@for file in $(BASELINES); do \
	  echo "== $$file"; \
	  for package in $$(grep -v '^#' $$file); do \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $$package \
	      || echo "-- $$package failed; see $$file, and until then rows that say not_installed"; \
	  done; \
	done
	$(BIN)/moebench doctor

reproduce: $(STAMP) $(if $(HAS_GPU),baselines)  ## measure what this machine can, draw every figure, and report; for part of it: make reproduce WITHIN=25m
	$(BIN)/moebench reproduce $(if $(WITHIN),--within $(WITHIN))

test: $(STAMP)  ## the test suite; no GPU needed
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/interpreter
	$(BIN)/python -m pytest -n 2 --dist worksteal --benchmark-disable

check: $(STAMP)  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

smoke: $(STAMP)  ## a sweep of seconds
	$(BIN)/moebench run smoke

regress: $(STAMP)  ## compare with this GPU's baseline; options: make regress REGRESS="--repeat 3"
	$(BIN)/moebench regress $(REGRESS)

plots: $(STAMP)  ## draw the figures from the rows in results/
	$(BIN)/moebench plot

report: $(STAMP)  ## claims, figures and tables on the terminal, as Markdown and as one HTML page
	$(BIN)/moebench report

clean:  ## remove the environment and local results
	rm -rf $(VENV) results/local
