# make serve    set up, make a tiny model, serve it, print a conversation of two turns with its cache statistics, and
#               keep serving
# make demo     the same on a free port, then stop the server
# make test     set up, format and lint checks, types, the tests that matter most (not marked `full`)
# make test-all make test, then make test-rest
# make test-rest   the tests that make test leaves out
# make bench    the benchmarks
# make check-recipes   resolve both recipes of `make setup` for a fresh machine, without installing anything
# make docs     build docs/ as a site in build/site, in the environment .venv-docs; broken links are errors
# make wheels   dist/: sdist, a pure wheel, one with compiled kernels for ARCHS (docs/reference/release.md), SBOM; tried
# Variables: PYTHON (interpreter to make the environment with), RECIPE (cpu or cuda; default: what the machine has),
# MODEL (checkpoint folder of serve and demo), ARGS (more arguments for serve, or for pytest in test and test-rest).

VENV ?= .venv
MODEL ?= .cache/tiny
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
ARGS ?=

export PYTHON
# Setup installs without bytecode, so Python must keep the bytecode that it compiles. Otherwise each process of a server
# would compile torch, transformers and sglang again, 14 s of CPU time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup test test-all test-rest lint format serve demo bench check-recipes docs wheels

setup: $(STAMP)

$(STAMP): pyproject.toml tools/setup.sh tools/requirements-cpu.txt tools/patch_torchvision_cpu.py
	tools/setup.sh $(VENV) '$(RECIPE)'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	git ls-files -z '*.cu' '*.cuh' '*.h' '*.cpp' | xargs -0 $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	git ls-files -z '*.cu' '*.cuh' '*.h' '*.cpp' | xargs -0 $(BIN)/clang-format -i
	$(BIN)/ruff check --fix .

# Keep freed memory in the process: returning it would make the system clear every page again, a tenth of the time.
test test-rest: export MALLOC_TRIM_THRESHOLD_ = 1073741824
test test-rest: export MALLOC_MMAP_THRESHOLD_ = 1073741824
# Two processes. A file is not split, because its tests share servers.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15

test: lint
	$(PYTEST) -m "not full" $(ARGS)

test-rest: $(STAMP)
	$(PYTEST) -m full $(ARGS)

test-all: test
	$(MAKE) test-rest

$(MODEL)/config.json: | $(STAMP)
	$(BIN)/dsv4-sglang make-tiny $(MODEL)

serve: $(STAMP) $(MODEL)/config.json
	$(BIN)/dsv4-sglang serve --model-path $(MODEL) --ask "What are the two halves of the cache?" $(ARGS)

demo: $(STAMP) $(MODEL)/config.json
	$(BIN)/dsv4-sglang demo --model-path $(MODEL) $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run $(ARGS)

check-recipes: $(STAMP)
	$(BIN)/python tools/check_recipes.py $(RECIPE)

.venv-docs/.setup-done: tools/requirements-docs.txt
	$(or $(PYTHON),python3) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q -r $<
	touch $@

docs: .venv-docs/.setup-done
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

wheels: $(STAMP)
	tools/wheels.sh $(BIN)/python $(ARCHS)
