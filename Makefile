# make test    set up .venv and run the whole test suite; PYTEST_ARGS="..." passes arguments to pytest
# make test-versions
#              run the tests with other versions of torch and Python, each in an environment of its own (see below)
# make test-frameworks
#              run the tests inside transformers, accelerate and lightning, in an environment of their own
# make report  set up .venv, measure the optimizers on this machine, print tables and write report.html;
#              PERF_ARGS="..." passes arguments to perf
# make docs    build the documentation into build/site; a broken link or a missing page is an error
# make docs-serve
#              serve the documentation on http://127.0.0.1:8000, and build it again after every change
# make matrix  measure the correctness matrix and write docs/correctness.md
# make table   write the table of optimizers, docs/optimizers.md, from the catalog
# make lint    ruff, mypy, import-linter, and the schemas of workflows and other YAML files
# make wheel   build the wheel, install it into a clean environment and step an optimizer there

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH_NPU := $(VENV)/torch_npu
FRAMEWORKS := .venv-frameworks
SCHEMA := $(BIN)/check-jsonschema --builtin-schema
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

# the interpreters of the other versions of Python
PYTHON312 ?= python3.12
PYTHON313 ?= python3.13
VERSIONS ?= test-torch-2.12 test-torch-2.14 test-torch-2.15 test-python-3.12 test-python-3.13

.PHONY: test test-versions test-frameworks report docs docs-serve matrix table lint wheel clean

# in two processes, each file in one of them: most of the time is spent by compilers, one at a time
test: $(READY) $(TORCH_NPU)
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

# one at a time, because an environment with a CUDA build of torch takes 5 GB. KEEP=1 keeps the environments, and
# VERSIONS="test-torch-2.14" runs only some; test-torch-<release> and test-python-3.<minor> are targets too
test-versions:
	$(MAKE) --keep-going --jobs=1 $(VERSIONS)

test-torch-%:
	.ci/test_version $(PYTHON) $* $(PYTEST_ARGS)

# with the torch that `make test` uses
test-python-3.%:
	.ci/test_version $(PYTHON3$*) 2.13 $(PYTEST_ARGS)

test-frameworks: $(FRAMEWORKS)/.ready
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks $(PYTEST_ARGS)

report: $(READY)
	$(BIN)/python -m perf --html report.html $(PERF_ARGS)

# Warnings are errors (strict), but not with --quiet, which hides them before they are counted. The second command finds
# what a page would load from another host. The variable silences an advertisement of the theme
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	$(BIN)/python -m website.check build/site

docs-serve: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

matrix: $(READY)
	$(BIN)/python -m catalog.matrix

table: $(READY)
	$(BIN)/python -m catalog.table

# mypy and import-linter read an installed copy: only there is backends/ a part of the package
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(PIP) --no-deps --no-build-isolation --target build/typed .
	cp -r catalog perf website build/typed
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p compiled_optim -p catalog -p perf -p website
	cd build/typed && ../../$(BIN)/lint-imports --config ../../pyproject.toml --no-cache
	$(SCHEMA) vendor.github-workflows .github/workflows/*.yml
	$(SCHEMA) vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(SCHEMA) vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA) vendor.dependabot .github/dependabot.yml
	$(SCHEMA) vendor.citation-file-format CITATION.cff

wheel: $(READY)
	rm -rf build
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(BIN)/python .ci/check_wheel.py build/wheel/*.whl
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install --quiet --constraint constraints.txt build/wheel/*.whl
	cd build && clean/bin/python ../.ci/step_once.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable ".[dev,docs,perf]"
	touch $@

# unpacked aside, never installed: without CANN, an installed torch_npu makes `import torch` raise
$(TORCH_NPU): constraints.txt | $(READY)
	rm -rf $@
	$(PIP) --no-deps --target $@ torch_npu
	touch $@

$(FRAMEWORKS)/.ready: PIP := $(FRAMEWORKS)/bin/pip install --quiet --constraint constraints-frameworks.txt
$(FRAMEWORKS)/.ready: pyproject.toml constraints-frameworks.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable ".[frameworks]"
	touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) .versions build
