# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# PYTHON is the interpreter of the environment; unset, deploy/make_venv.sh chooses one.
VENV := .venv
BIN := $(VENV)/bin
# Written last by an install that ended well; older than its inputs means install again.
STAMP := $(VENV)/.installed

.PHONY: quickstart test fast check format install docs site gpu clean

quickstart: $(STAMP)  ## The whole pipeline on the built-in sample, then what the model learned
	$(BIN)/python flows/finetune.py configs/quickstart.yaml
	$(BIN)/penstock eval configs/quickstart.yaml --n 200

test: $(STAMP)  ## All tests
	$(BIN)/python -m pytest

fast: $(STAMP)  ## The tests of one process that end within minutes
	$(BIN)/python -m pytest -m "not slow and not dist and not exhaustive"

check: $(STAMP)  ## Format, lint, floors, budgets, types, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.budgets
	$(BIN)/basedpyright
	$(BIN)/python -m penstock.config.generate_docs --check

format: $(STAMP)  ## Write code as `check` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)  ## Regenerate the pages and schemas of settings in configs/
	$(BIN)/python -m penstock.config.generate_docs

site: $(STAMP)  ## The documentation as a site in site/; a broken link is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[site]'
	$(BIN)/python -m mkdocs build --strict

gpu: $(STAMP)  ## On a machine with a GPU: tests and benchmarks in order of worth, resumable
	$(BIN)/python -m tests.bench.gpu $(ARGS)

install: $(STAMP)  ## Only the environment

# Another PYTHON than the environment's: install again.
OF_PYTHON := -c 'import sys; print(sys.hexversion, sys.base_prefix)' 2>&1
ifneq ($(PYTHON),)
ifneq ($(shell $(PYTHON) $(OF_PYTHON)),$(shell $(BIN)/python $(OF_PYTHON)))
.PHONY: $(STAMP)
endif
endif

$(STAMP): pyproject.toml constraints.txt
	sh deploy/make_venv.sh $(VENV) $(PYTHON)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:  ## Remove the environment and caches; artifacts and outputs stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
