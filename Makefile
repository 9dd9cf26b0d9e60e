# Everything a fresh machine needs: python3 >= 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JAX ?=
TESTS ?= tests
TYPED := values.py jit.py vmap.py remat.py callib.py datacarrier.py fingerprint.py utils.py xla_utils.py
INTERPRETED := values.py gradients.py jit.py vmap.py remat.py determinism.py triton_interpreted.py lab_study_interpreted.py
# Of vmap's cases one for each part that may be batched.
INTERPRETED_ONLY := (triton or lab_study_interpreted) and not (vmap_equals_a_loop and not (all-masked or not_query-packed or last-dropout))
ON_GPU := values.py gradients.py jit.py vmap.py remat.py determinism.py
GPU_JOBS ?= 4

.PHONY: demo test test-interpreted test-gpu typecheck lint format docs bench clean

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[lab]" $(JAX)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet -e ".[lab,test]" $(JAX)
	@touch $@

demo: $(VENV)/.demo  ## install, then a page about this machine: which kernels it runs, how right, how fast
	$(BIN)/ejkernel report --quick

test: $(VENV)/.test  ## install, then run the suite; TESTS=tests/test_x.py: that alone
	$(BIN)/python -m pytest -n 2 $(TESTS)
	$(if $(filter file,$(origin TESTS)),@$(MAKE) --no-print-directory test-interpreted)

test-interpreted: $(VENV)/.test  ## the Triton kernels in Triton's interpreter, which patches Triton: a process of its own
	@if $(BIN)/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('triton') is None)"; then \
	  TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -k "$(INTERPRETED_ONLY)" \
	    $(addprefix tests/test_,$(INTERPRETED)); \
	else echo "triton is not installed (it has wheels for Linux on x86_64): its interpreter is skipped"; fi

$(VENV)/.gpu: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -e ".[lab,test,gpu]" $(JAX)
	@touch $@

test-gpu: $(VENV)/.gpu  ## the tests of the operations, and those that need a GPU, on the GPU of this machine
	export JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false; \
	$(BIN)/python -m pytest -n $(GPU_JOBS) $(addprefix tests/test_,$(ON_GPU)) && \
	{ $(BIN)/python -m pytest -n $(GPU_JOBS) -m gpu $(addprefix --ignore=tests/test_,$(ON_GPU)) tests || [ $$? -eq 5 ]; }

typecheck: $(VENV)/.test  ## a part of the suite with every annotated shape and type checked at run time
	$(BIN)/python -m pytest -n 2 --jaxtyping-packages=ejkernel,beartype.beartype $(addprefix tests/test_,$(TYPED))

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

clean:
	rm -rf $(VENV) .venv-* .cache .pytest_cache .ruff_cache build *.egg-info

$(VENV)/.wheel:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet build
	@touch $@

.PHONY: wheel
wheel: $(VENV)/.wheel  ## build the source distribution and the wheel into dist/
	$(BIN)/python -m build
