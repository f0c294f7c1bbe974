# `make demo` and `make test` do all the set-up that they need; PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test soak lint types wheel bench clean

demo: .venv/.installed  ## ask the bundled model about pictures it has never seen, over a restart
	$(BIN)/featcache demo

test: .venv/.installed-dev  ## the default tests, under ten minutes on two cores
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

soak: .venv/.installed-dev  ## the long ones
	$(BIN)/python -m pytest -m soak

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-dev wheel  ## on the installed wheel, as a user's type checker sees it
	.ci/try-wheel

wheel: .venv/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null

bench: .venv/.installed-dev
	$(BIN)/python bench/store.py
	$(BIN)/python bench/engine.py

.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "featcache needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: .venv/.python pyproject.toml constraints.txt
	@echo "Installing featcache and what it needs into .venv (PyTorch is most of it) ..."
	$(PIP) --editable .
	touch $@

.venv/.installed-dev: .venv/.installed tests/lmdeploy.txt
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps --requirement tests/lmdeploy.txt \
	  || echo "LMDeploy can't be installed here: the tests of that backend are skipped"
	touch $@

clean:
	rm -rf build dist .venv *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
