# Everything a fresh machine needs: python3 >= 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JAX ?=
TESTS ?= tests
TYPED := values.py jit.py vmap.py remat.py callib.py datacarrier.py fingerprint.py utils.py xla_utils.py

.PHONY: demo test typecheck lint format docs bench clean

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[lab]" $(JAX)
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet -e ".[lab,test]" $(JAX)
	@touch $@

demo: $(VENV)/.demo  ## install, then show which kernels this machine runs and how fast
	$(BIN)/ejkernel report --quick

test: $(VENV)/.test  ## install, then run the suite
	$(BIN)/python -m pytest -n 2 $(TESTS)

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
