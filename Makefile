# Two commands do all the set-up on a fresh machine: `make replay` and `make test`.
#
#   PYTHON=python3.12        the interpreter that a new virtual environment is made from;
#                            after `make clean`, if there is one already
#   ARGS="..."               appended to the command that the target runs
#   CONSTRAINTS=FILE         a pip constraints file for what is installed
#   TORCH=1                  installs torch for the tests that exchange tensors with it
#   KERNELS=1                installs NVRTC for the tests that compile the CUDA kernels
#   CUDA=cuda13              the extra with CuPy that `make bench` installs: by default the one for
#                            the driver that nvidia-smi names, and none where there is none
#   DEBUG=1                  runs in debug mode: the laws are proven after every call

PYTHON ?= python3
ARGS ?=
CONSTRAINTS ?=
TORCH ?=
KERNELS ?=
CUDA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\(1[23]\)\..*/cuda\1/p' | head -n 1)
DEBUG ?=
REPLAY_DEFAULTS ?= --limit 1000

VENV := .venv
VENV_TEST := .venv-test

comma := ,
PIP_FLAGS := --quiet --disable-pip-version-check $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))

# A stamp says what was installed, so that another choice of TORCH or CONSTRAINTS installs again.
flavour = $(if $(CONSTRAINTS),-$(subst /,_,$(CONSTRAINTS)))
RUN_STAMP := $(VENV)/.installed$(flavour)
TEST_STAMP := $(VENV_TEST)/.installed-test$(if $(TORCH),-torch)$(if $(KERNELS),-kernels)$(flavour)
BENCH_STAMP := $(if $(CUDA),$(VENV)/.installed-$(CUDA)$(flavour))
LINT_STAMP := $(VENV_TEST)/.installed-lint$(flavour)
METADATA := setup.py pyproject.toml sgalloc/_version.py $(CONSTRAINTS)

ifneq ($(DEBUG),)
export SGALLOC_DEBUG = $(DEBUG)
endif

# A virtual environment that could not be finished is not taken for one next time.
.DELETE_ON_ERROR:

.PHONY: help replay test lint bench clean

help:
	@echo "make replay   run the allocator under generated traffic (ARGS=\"--help\" lists the options)"
	@echo "make test     run the tests (TORCH=1 KERNELS=1: those with torch and NVRTC too;"
	@echo "              DEBUG=1: in debug mode)"
	@echo "make lint     ruff and mypy"
	@echo "make bench    all benchmarks: the host's, and the GPU's where there is one"
	@echo "make clean    remove the virtual environments and everything built"

replay: $(RUN_STAMP)
	$(VENV)/bin/sgalloc replay $(REPLAY_DEFAULTS) $(ARGS)

bench: $(RUN_STAMP) $(BENCH_STAMP)
	$(VENV)/bin/python -m profiling.everything $(ARGS)

test: $(TEST_STAMP)
	$(VENV_TEST)/bin/python -m pytest $(ARGS)

lint: $(LINT_STAMP)
	$(VENV_TEST)/bin/ruff check .
	$(VENV_TEST)/bin/ruff format --check .
	$(VENV_TEST)/bin/mypy

clean:
	rm -rf $(VENV) $(VENV_TEST) build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

%/bin/python:
	$(PYTHON) -m venv $*

$(RUN_STAMP): $(METADATA) | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable ".[cli,report]"
	@touch $@

ifneq ($(BENCH_STAMP),)
$(BENCH_STAMP): $(RUN_STAMP)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --editable ".[cli,report,$(CUDA)]"
	@touch $@
endif

$(TEST_STAMP): $(METADATA) | $(VENV_TEST)/bin/python
	$(VENV_TEST)/bin/python -m pip install $(PIP_FLAGS) --editable ".[test$(if $(TORCH),$(comma)torch)$(if $(KERNELS),$(comma)kernels)]"
	@touch $@

$(LINT_STAMP): $(METADATA) | $(VENV_TEST)/bin/python
	$(VENV_TEST)/bin/python -m pip install $(PIP_FLAGS) --editable ".[test,dev]"
	@touch $@
