# Everything a fresh machine needs: python3 >= 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JAX ?=
TESTS ?= tests
# Of slow tests: an expression of markers.
MARKED ?=
JOBS ?= 2
GPU_JOBS ?= 4
# JAX's CUDA plugin compiles for GPUs that are not there: without CUDA's libraries, which only a GPU needs.
export JAX_SKIP_CUDA_CONSTRAINTS_CHECK := 1

.PHONY: demo test test-slow test-full test-gpu typecheck types lint format docs site bench wheel clean

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[lab]" $(JAX)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet -e ".[lab,test]" $(JAX)
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  jax=$$($(BIN)/python -c "from importlib.metadata import version; print(version('jax'))"); \
	  $(BIN)/python -m pip install --quiet --no-deps "jax-cuda13-plugin==$$jax" "jax-cuda13-pjrt==$$jax" \
	    || echo "no CUDA plugin for jax $$jax: the tests that compile for GPUs are skipped"; \
	fi
	@touch $@

demo: $(VENV)/.demo  ## install, then a page about this machine: which kernels it runs, how right, how fast
	$(BIN)/ejkernel report --quick

# A lane of the suite: $(1) are its options. Triton's interpreter patches Triton, so what it runs has a process of its own.
define lane
@begin=$$(date +%s); \
run() { $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(1) $(TESTS) || [ $$? -eq 5 -a "$(TESTS)$(MARKED)" != tests ]; }; \
run && \
if $(BIN)/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('triton') is None)"; then \
  (export TRITON_INTERPRET=1 OPENBLAS_NUM_THREADS=1; run); \
else \
  echo "triton is not installed (it has wheels for Linux on x86_64): its interpreter is skipped"; \
fi && \
echo "make $@: $$(($$(date +%s) - begin)) seconds"
endef

test: $(VENV)/.test  ## install, then the short lane: every property, implementation and feature; TESTS=tests/test_x.py: a part
	$(call lane,-m "not slow")

test-slow: $(VENV)/.test  ## what make test leaves out; MARKED="interpreted" or "not compiled": a part
	$(call lane,-m "slow$(if $(MARKED), and ($(MARKED)))")

test-full: $(VENV)/.test  ## everything
	$(call lane)

$(VENV)/.gpu: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -e ".[lab,test,gpu]" $(JAX)
	@touch $@

test-gpu: $(VENV)/.gpu  ## the properties of all implementations, and the tests that need a GPU, on the GPU of this machine
	JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest -n $(GPU_JOBS) -m gpu $(TESTS)

typecheck: $(VENV)/.test  ## a part of the suite with every annotated shape and type checked at run time
	@begin=$$(date +%s); \
	$(BIN)/python -m pytest -n $(JOBS) --jaxtyping-packages=ejkernel,beartype.beartype -m "typed and not slow" $(TESTS) && \
	echo "make $@: $$(($$(date +%s) - begin)) seconds"

types: $(VENV)/.test  ## pyright, strict, over uses of the public names, and whether the type of each is known
	$(BIN)/python tools/public_types.py

lint: $(VENV)/.test  ## ruff, and that the generated docs are current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/generate.py --check

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test  ## write the parts of the docs that come from the code
	$(BIN)/python docs/generate.py

$(VENV)/.site: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[docs]" $(JAX)
	@touch $@

site: $(VENV)/.site  ## the documentation as pages in site/; a broken link or a missing reference fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site"

bench: $(VENV)/.test  ## time the XLA kernels beside their peers (torch too, if it is installed)
	for benchmark in benchmarks/*_cpu.py; do $(BIN)/python $$benchmark || exit 1; done

clean:
	rm -rf $(VENV) .venv-* .cache .pytest_cache .ruff_cache build dist site *.egg-info

$(VENV)/.wheel:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet build
	@touch $@

wheel: $(VENV)/.wheel  ## build the source distribution and the wheel into dist/
	$(BIN)/python -m build
