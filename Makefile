# Every command of this project, one word each. `make help` lists them; add -s for less talk.
#
#   make train ARGS="--steps 50"                  more arguments for the command behind a target
#   make test PYTHON=python3.13 VENV=.venv-3.13   another Python, another virtual environment
#
# The first target that needs the virtual environment makes it, from the pinned and hashed
# requirements of its Python version; later ones reuse it until those or pyproject.toml change.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

# pytest's worker processes. Each one simulates several devices, so more than a few do not pay.
JOBS      ?= auto
MAX_JOBS  ?= 4

.DEFAULT_GOAL := help
.PHONY: help setup train test test-slow test-cluster test-all test-oldest mutants check format bench docs package lock clean

bin   := $(VENV)/bin
stamp := $(VENV)/.set-up
engines := $(VENV)/.set-up-engines
mutator := $(VENV)-mutants/bin/python
oldest := $(VENV)-oldest/.set-up

# An environment that is there already keeps its Python; otherwise $(PYTHON) makes it.
builder := $(if $(wildcard $(bin)/pip),$(bin)/python,$(PYTHON))
version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
version := $(call version_of,$(builder))

# So a PYTHON that was asked for must not be passed over in silence.
ifneq ($(origin PYTHON),file)
  ifneq ($(filter-out clean help,$(MAKECMDGOALS)),)
    asked := $(call version_of,$(PYTHON))
    ifneq ($(filter-out $(version),$(asked)),)
      $(error $(VENV) holds Python $(version), but PYTHON=$(PYTHON) is $(asked). Give it an environment of its own: make $(MAKECMDGOALS) PYTHON=$(PYTHON) VENV=.venv-$(asked))
    endif
  endif
endif

# Python 3.11 and 3.12 have their own locks; 3.13 and later use the newest one.
lock    := requirements/python$(if $(filter 3.11 3.12,$(version)),$(version),3.13).txt

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(stamp)  ## make the virtual environment, without running anything

train: $(stamp)  ## the main job: train the digits recipe
	@$(bin)/multitower train digits $(ARGS)

cached  := test test-slow test-all test-oldest mutants
testing := $(cached) test-cluster

# Compiling is what tests wait for, and many of them compile the same: JAX keeps the programs.
# (The tests of the same bits over processes do without, see tests/shared/same_bits_program.py.)
$(cached): export JAX_COMPILATION_CACHE_DIR := $(abspath $(VENV))/jax-cache
$(cached): export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
$(cached): export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1
# NumPy's threads would wait for work while the cores have other tests to run.
$(testing): export OPENBLAS_NUM_THREADS := 1
# Python keeps what it compiles too, whatever the shell says: hundreds of processes read our sources.
$(testing): export PYTHONDONTWRITEBYTECODE :=
# Nor do tests wait for most optimizations, but where bits are what is tested (conftest.py).
$(testing): export JAX_DISABLE_MOST_OPTIMIZATIONS := 1

test: $(stamp)  ## everyday tests and all docstring examples
	$(bin)/python -m pytest -n $(JOBS) --maxprocesses $(MAX_JOBS) $(ARGS)

# Only tests/ has slow tests. None at all is a failure (pytest's exit 5), not a silent pass.
test-slow: $(stamp)  ## the long tests: kill and resume, many device counts, several processes
	$(bin)/python -m pytest -n $(JOBS) --maxprocesses $(MAX_JOBS) -m "slow and not cluster" tests $(ARGS)

# Each file of tests starts engines of its own, in one worker, and mostly waits for them.
test-cluster: $(engines)  ## SLURM, Open MPI, Ray, two hosts, XLA's compiler for GPUs (root, Debian)
	$(bin)/python -m pytest -n $(JOBS) --maxprocesses $(MAX_JOBS) -m cluster tests $(ARGS)

test-all: $(engines)  ## all of them at once, as CI does: while some wait, others compute
	$(bin)/python -m pytest -n $(JOBS) --maxprocesses $(MAX_JOBS) -m "" $(ARGS)

# What pyproject.toml promises, and the locks do not show. The oldest NumPy needs Python 3.11 or 3.12.
test-oldest: $(oldest)  ## everyday tests with the oldest releases that pyproject.toml admits
	$(VENV)-oldest/bin/python -m pytest -n $(JOBS) --maxprocesses $(MAX_JOBS) $(ARGS)

mutants: $(stamp) $(mutator)  ## do tests notice small bugs? MODULE=engines/reduction
	$(mutator) benchmarks/mutants.py $(abspath $(bin)/python) $(MODULE) $(ARGS)

check: $(stamp)  ## lint, format, types and layers; changes nothing
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/basedpyright --pythonpath $(bin)/python
	$(bin)/lint-imports --no-cache --no-logo
	@! grep -nE '://|^-' requirements/*.txt || { echo "A lock names packages, never where they come from." >&2; exit 1; }

format: $(stamp)  ## repair what ruff can repair
	$(bin)/ruff check --fix
	$(bin)/ruff format

bench: $(stamp)  ## the cost of one step against hand-written JAX
	$(bin)/python benchmarks/step_overhead.py $(ARGS)

# A warning is an error: a broken link, a name that the reference cannot find.
docs: $(stamp)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict $(ARGS)

# The tests build the same files once more, install them in clean environments and run them there.
package: $(stamp)  ## build the sdist and the wheel into dist/, and try them
	rm -rf dist
	$(bin)/python -m hatchling build -d dist
	$(bin)/python -m pytest -m "slow or not slow" tests/project/test_package.py $(ARGS)

# Keeps every pin that still fits; `make lock ARGS=--upgrade` takes the newest releases.
# "universal" hashes all platforms' wheels; "fewest" gives one version for one Python.
# A lock names packages only, never the index they came from: the sed makes sure of it.
lock: | $(bin)/uv  ## write requirements/*.txt anew from pyproject.toml
	@for minor in 11 12 13; do \
	  file=requirements/python3.$$minor.txt; \
	  echo "$$file"; \
	  $(bin)/uv pip compile pyproject.toml --extra dev --quiet \
	    --universal --python-version 3.$$minor --fork-strategy fewest \
	    --generate-hashes --no-annotate --no-header $(ARGS) -o $$file >/dev/null || exit 1; \
	  cluster=requirements/cluster-python3.$$minor.txt; \
	  echo "$$cluster"; \
	  $(bin)/uv pip compile requirements/cluster.in --constraints $$file --quiet \
	    --universal --python-version 3.$$minor --fork-strategy fewest \
	    --generate-hashes --no-annotate --no-header $(ARGS) -o $$cluster >/dev/null || exit 1; \
	  sed -i.old '/^-/d' $$file $$cluster && rm -f $$file.old $$cluster.old; \
	  cuda=requirements/cuda-python3.$$minor.txt; \
	  echo "$$cuda"; \
	  echo 'jax[cuda13-local]' | $(bin)/uv pip compile - --constraints $$file --quiet \
	    --universal --python-version 3.$$minor --fork-strategy fewest \
	    --generate-hashes --no-annotate --no-header $(ARGS) > $$cuda.all || exit 1; \
	  awk '/^[a-z]/ { keep = /^jax-cuda/ } keep' $$cuda.all > $$cuda && rm -f $$cuda.all; \
	done
	@echo requirements/mutants.txt
	@$(bin)/uv pip compile requirements/mutants.in --quiet --universal --python-version 3.11 \
	  --generate-hashes --no-annotate --no-header $(ARGS) -o requirements/mutants.txt >/dev/null
	@sed -i.old '/^-/d' requirements/mutants.txt && rm -f requirements/mutants.txt.old

clean:  ## remove the virtual environments, caches and build products
	rm -rf $(VENV) $(VENV)-mutants $(VENV)-oldest .venv-ci-* build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ------------------------------------------------------------------ the virtual environment

# pip is quiet (-qq) but shows errors. It would compile on one core what compileall does on all of them,
# without packages' tests. The stamp comes last, so that a failure is tried again.
compile = $(bin)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib/python*/site-packages >/dev/null 2>&1 || true

$(stamp): $(lock) pyproject.toml
	@$(builder) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "multitower needs Python 3.11 or newer; '$(builder)' is $(if $(version),Python $(version),not a Python that runs)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.13" >&2; \
	  exit 1; }
	@echo "Setting up $(VENV) for Python $(version) from $(lock): under a minute, once." >&2
	@test -x $(bin)/pip || $(builder) -m venv $(VENV)
	@$(bin)/python -m pip install -qq --no-compile --require-hashes -r $(lock) || { \
	  echo "The pinned packages of $(lock) could not be installed for Python $(version) (see above)." >&2; \
	  echo "The locks are tested with Python 3.11 to 3.14: make $(MAKECMDGOALS) PYTHON=python3.13 VENV=.venv-3.13" >&2; \
	  exit 1; }
	@$(compile)
	@$(bin)/python -m pip install -qq --no-deps --no-build-isolation -e .
	@missing=$$($(bin)/python -m pip check) || { \
	  echo "$(lock) no longer fits pyproject.toml; run 'make lock'. pip says:" >&2; \
	  echo "$$missing" >&2; \
	  exit 1; }
	@touch $@

# Ray and the schema of JobSet, for the tests on engines alone; and JAX's compiler for GPUs, in a
# folder of its own: where JAX finds it, it looks for GPUs at every start.
$(engines): requirements/cluster-$(notdir $(lock)) requirements/cuda-$(notdir $(lock)) $(stamp)
	@$(bin)/python -m pip install -qq --no-compile --require-hashes -r $<
	@$(bin)/python -m pip install -qq --no-compile --no-deps --require-hashes --upgrade \
	  --target $(VENV)/cuda -r $(word 2,$^)
	@$(compile)
	@touch $@

# The mutation tester needs none of our packages, and brings many of its own.
$(mutator): requirements/mutants.txt
	@$(builder) -m venv $(VENV)-mutants
	@$(mutator) -m pip install -qq --require-hashes -r $<
	@touch $@

# Not a lock: what the index has is resolved anew whenever pyproject.toml changes.
$(oldest): pyproject.toml $(stamp)
	@rm -rf $(VENV)-oldest
	@$(bin)/python -m venv $(VENV)-oldest
	@$(bin)/uv pip compile pyproject.toml --extra dev --resolution lowest-direct --quiet \
	  --python $(bin)/python --no-annotate --no-header -o $(VENV)-oldest/oldest.txt >/dev/null
	@$(VENV)-oldest/bin/python -m pip install -qq -r $(VENV)-oldest/oldest.txt
	@$(VENV)-oldest/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

# For `make lock` alone: the locks that are to be replaced bring the tool that replaces them.
$(bin)/uv:
	@$(MAKE) --no-print-directory setup
