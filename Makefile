# Everything a fresh machine needs: python3 >= 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JAX ?=
TESTS ?= tests
JOBS ?= 2
GPU_JOBS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(JOBS)
# Tests that run in the process whose Triton is the interpreter; tests/conftest.py leaves out all others there.
INTERPRETER := TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1
# The plugin that compiles for GPUs is there without CUDA's libraries, which only a GPU needs.
export JAX_SKIP_CUDA_CONSTRAINTS_CHECK ?= 1

.PHONY: demo test test-full test-gpu typecheck lint format docs bench wheel clean

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[lab]" $(JAX)
	@touch $@

# Kernels are compiled for GPUs on machines without one: by these packages, which exist for Linux on x86_64.
$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet -e ".[lab,test]" $(JAX)
	@version=$$($(BIN)/python -c "import jax; print(jax.__version__)"); \
	$(BIN)/python -m pip install --quiet --no-deps "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" || \
	  echo "no jax-cuda13-plugin $$version here: tests that compile kernels for GPUs are skipped"
	@touch $@

demo: $(VENV)/.demo  ## install, then a page about this machine: which kernels it runs, how right, how fast
	$(BIN)/ejkernel report --quick

test: $(VENV)/.test  ## install, then the short lane; TESTS=tests/test_x.py: that alone
	$(PYTEST) -m "not slow" $(TESTS)
	$(if $(filter file,$(origin TESTS)),$(INTERPRETER) $(PYTEST) -m "not slow")

test-full: $(VENV)/.test  ## every test that this machine can run
	$(PYTEST) $(TESTS)
	$(if $(filter file,$(origin TESTS)),$(INTERPRETER) $(PYTEST))

$(VENV)/.gpu: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -e ".[lab,test,gpu]" $(JAX)
	@touch $@

test-gpu: $(VENV)/.gpu  ## the property tests on the GPU of this machine, and those that need one
	JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest -n $(GPU_JOBS) -m gpu $(TESTS)

typecheck: $(VENV)/.test  ## a part of the suite with every annotated shape and type checked at run time
	$(PYTEST) -m "typed and not slow" --jaxtyping-packages=ejkernel,beartype.beartype

lint: $(VENV)/.test  ## ruff, and that the generated docs are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/generate.py --check

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test  ## write the parts of the docs that come from the code
	$(BIN)/python docs/generate.py

bench: $(VENV)/.test  ## time the XLA kernels beside their peers (torch too, if it is installed)
	for benchmark in benchmarks/*_cpu.py; do $(BIN)/python $$benchmark || exit 1; done

$(VENV)/.wheel:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet build
	@touch $@

wheel: $(VENV)/.wheel  ## build the source distribution and the wheel into dist/
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) .venv-* .cache .pytest_cache .ruff_cache build dist *.egg-info
