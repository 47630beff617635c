# Everything that a contributor or CI runs. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# PySpark's archive is close to half a gigabyte: a slow line needs more than uv's 30 s.
export UV_HTTP_TIMEOUT ?= 300

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: env
env: $(STAMP)  ## Make .venv with the package (editable) and all development tools

# Redone only when what it is made from has changed; everything is pinned by constraints.txt, uv itself too.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "Python 3.10 to 3.13 is needed; name one: make env PYTHON=python3.12" >&2; exit 1; }
	$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e . --group dev
	@touch $@
