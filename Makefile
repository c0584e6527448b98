# Distributed Training, Rung by Rung. `make help` lists what there is.
# Two commands matter: `make book` builds the course, `make test` runs everything CI runs.

START := $(shell date +%s)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The first Python from 3.11 to 3.13; `make book PYTHON=python3.12` chooses another.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && exit; \
  done; echo python3)
VENV := .venv
BIN := $(VENV)/bin
SITE := _build/html
# What `make setup-gpu` leaves: an environment around the image's torch, without the book.
IMAGE_VENV := $(wildcard $(VENV)/image-constraints.txt)
# One file stays on one worker, in the order of conftest.py: what takes long comes first.
WORKERS ?= 2
# A worker that dies ends the run, which names the test: with loadfile its file may be given to nobody, and be waited for.
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
NBVAL := --nbval --nbval-cell-timeout=300
SITE_TESTS := tests/test_book.py tests/test_links.py tests/test_questions.py tests/test_release.py tests/test_teaching.py tests/browser
# Where nbval leaves the labs that it ran.
EXECUTED := $(CURDIR)/.cache/executed

export PYTHONUNBUFFERED := 1
# Hundreds of ranks and kernels import lablib: without bytecode each of them would compile it again.
export PYTHONDONTWRITEBYTECODE :=
# Whatever the locale: the same encoding for every file and pipe.
export PYTHONUTF8 := 1
# A build and a test run write apart from the learner's own distributed-experiments/, and draw no bars.
site check unit labs: export LABLIB_EXPERIMENTS := $(CURDIR)/_build/experiments
site check unit labs: export TQDM_DISABLE := 1
site check unit labs: export HF_HUB_OFFLINE := 1

# Seconds on 2 cores. Over it a command says so; LABLIB_BUDGETS=5, which .ci/run sets, fails at five times of it.
BOOK_BUDGET := 480
TEST_BUDGET := 720

##@ Read and work

.PHONY: book
book: install site ## Install, run every lab on CPU, build the site from a clean folder
	@echo
	@echo "The book is at $(SITE)/index.html. Read it with: make serve"
	@$(BIN)/python tools/stages.py --report "make book" --since $(START) --budget $(BOOK_BUDGET)

.PHONY: serve
serve: install ## Serve the built book on a free port (make serve PORT=8080 for a fixed one)
	@exec $(BIN)/rung serve $(if $(PORT),--port $(PORT))

.PHONY: pdf
pdf: ## Print the built book as one PDF, without the labs (needs Chromium; make pdf PAGES=book/05_zero for a page)
	@$(BIN)/python tools/print_book.py $(SITE) _build/course.pdf $(PAGES)

.PHONY: lab
lab: $(if $(IMAGE_VENV),,install) ## Copy the labs to work/ (your files are never overwritten) and open JupyterLab there
	@exec $(BIN)/rung lab $(LAB_ARGS)

.PHONY: bundle
bundle: install site ## The copy for a class: site, labs without solutions, wheels (make bundle ROOM="--wheels linux-x86_64 macos-arm64")
	@$(BIN)/python tools/bundle.py $(ROOM)

.PHONY: setup-gpu
setup-gpu: ## On a CUDA image: keep its own torch, install the labs, skip the book (OWN_TORCH=1 brings a torch)
	@$(if $(filter file,$(origin PYTHON)),,PYTHON="$(PYTHON)") VENV="$(VENV)" \
	  tools/setup_gpu.sh $(if $(OWN_TORCH),--own-torch)

##@ Prove

# What tries many cases of one thing takes one in eight of them, others each time; `make thorough` takes all.
test: export LABLIB_SHARE ?= 8

.PHONY: thorough
thorough: ## Everything CI runs, with all cases of what it draws
	@$(MAKE) test LABLIB_SHARE=1

.PHONY: test
test: export EXECUTED_LABS := $(EXECUTED)
test: ## Everything CI runs: lint, arrows, unit tests, labs, book, links, browser
	@$(MAKE) --jobs install mathjax pyodide pagefind chromium frameworks # pip waits for the disk and the network: others may work
	@rm -rf $(EXECUTED)
	@$(BIN)/python tools/stages.py --name "make test" --since $(START) --budget $(TEST_BUDGET) \
	  lint arrows check site pages

.PHONY: lint
lint: install ## Ruff (lint and format) and notebooks stored without outputs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@find labs -name '*.ipynb' -not -path '*/.ipynb_checkpoints/*' -print0 | xargs -0 $(BIN)/nbstripout --verify --keep-id

.PHONY: arrows
arrows: install ## Which room may import which (import-linter)
	@$(BIN)/lint-imports

# One pytest run over both keeps both cores busy. Under `make test` the site is then built from the labs
# as nbval ran them here; `make book` and `make site` run every lab themselves, one at a time.
.PHONY: check
check: install ## Unit tests and labs (through nbval) together
	@$(PYTEST) $(NBVAL) -m "not site" --durations=10 --durations-min=5 tests labs

.PHONY: unit
unit: install ## Unit tests alone
	@$(PYTEST) -m "not site" tests

.PHONY: labs
labs: install ## Labs alone, through nbval
	@$(PYTEST) $(NBVAL) labs

.PHONY: pages
pages: install ## Tests of the site as last built: contents, internal links, browser
	@$(PYTEST) -m site $(SITE_TESTS)

# Not a part of `make test`. MATRIX_VENVS=folder keeps the environments elsewhere than in .cache/matrix.
.PHONY: matrix
matrix: ## Tests and labs under other Pythons and PyTorches (make matrix MATRIX="3.13/2.14.0")
	@$(PYTHON) tools/matrix.py --workers $(WORKERS) $(MATRIX)

.PHONY: bench
bench: install ## Speed against PyTorch's own implementations and against stated limits
	@$(BIN)/python -m tests.bench $(BENCH)

.PHONY: pretend
pretend: install ## Run the labs on machines that pretend to have 1, 2 and 8 GPUs (make pretend PRETEND="2 --labs 11")
	@$(BIN)/python -m tests.pretend $(PRETEND)

.PHONY: linkcheck
linkcheck: install ## Follow every external link (needs a network)
	@rm -rf _build
	@$(BIN)/jupyter-book build . --builder linkcheck -W --keep-going

# Not a part of `make test`: it downloads what builds and checks. Beside the sources a build would leave its own folders.
RELEASE := .cache/release
RELEASE_TOOLS := build==1.6.1 twine==7.0.0 validate-pyproject==0.27 check-wheel-contents==0.6.3 cffconvert==2.0.0
.PHONY: release
release: ## Build sdist and wheel, check both, and ask the installed wheel from another folder
	@rm -rf $(RELEASE) && mkdir -p $(RELEASE)/source $(RELEASE)/elsewhere
	@cp -R pyproject.toml README.md LICENSE LICENSE-PROSE CITATION.cff lablib $(RELEASE)/source
	@$(PYTHON) -m venv $(RELEASE)/tools && $(PYTHON) -m venv $(RELEASE)/installed
	@$(RELEASE)/tools/bin/python -m pip install -qq --disable-pip-version-check $(RELEASE_TOOLS)
	@cd $(RELEASE)/source && ../tools/bin/python -m build --outdir ../dist . >../build.log 2>&1 || { cat ../build.log; exit 1; }
	@cd $(RELEASE) && { tools/bin/python -m twine check --strict dist/* && tools/bin/validate-pyproject source/pyproject.toml && \
	  tools/bin/check-wheel-contents dist/*.whl && tools/bin/cffconvert --validate -i source/CITATION.cff; } \
	  >checks.log 2>&1 || { cat checks.log; exit 1; }
	@# A calculator needs neither torch nor what a lab brings: without them the environment is there in seconds.
	@$(RELEASE)/installed/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt typer click
	@$(RELEASE)/installed/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(RELEASE)/dist/*.whl
	@cd $(RELEASE)/elsewhere && ../installed/bin/rung models >models.txt && \
	  ../installed/bin/rung memory llama-3-8b --dp 8 --zero 3 --seq 8192 --gpu h100 >memory.txt && grep -q ' fits, ' memory.txt
	@echo "$$(cd $(RELEASE)/dist && ls *.whl) and its sdist are in $(RELEASE)/dist, checked and asked in $$(($$(date +%s) - $(START))) s." \
	  "$$(grep -q '^\[project.urls\]' pyproject.toml || echo 'They name no address: [project.urls] is missing until the project has one.')"

##@ Parts

.PHONY: memory-table
memory-table: install ## Measure the memory calculator's whole grid and write it anew, and the other calculators beside it
	@$(BIN)/python -m tests.evidence memory-table --write
	@$(BIN)/python -m tests.evidence memory-table --held-out --write
	@$(BIN)/python -m tests.evidence memory-peers --write

# Pages wait for kernels to start. Labs measure times, so a build that runs them runs one after the other, beside chapters.
PAGES_AT_A_TIME := $(if $(EXECUTED_LABS),4,2)

.PHONY: site
site: install mathjax pyodide pagefind ## Build the site from a clean _build, warnings as errors
	@rm -rf _build
	@$(BIN)/python tools/build_site.py $(PAGES_AT_A_TIME) . -W -n --keep-going

.PHONY: mathjax
mathjax: # Formulas that work offline, where npm is at hand; the CDN's otherwise.
	@tools/mathjax.sh

.PHONY: pyodide
pyodide: # Live pages that work offline, where npm is at hand; Pyodide from its CDN otherwise.
	@tools/pyodide.sh

.PHONY: pagefind
pagefind: # A search that finds sections, where npm is at hand; Sphinx's otherwise, which finds pages.
	@tools/pagefind.sh

.PHONY: chromium
chromium: # For the browser tests, where it can be had.
	@tools/chromium.sh

.PHONY: frameworks
frameworks: install # What the pages say of frameworks is held to these releases; tests skip what no network brought.
	@$(BIN)/python -m tests.evidence facts >/dev/null || true

.PHONY: install
install: $(VENV)/installed ## Create .venv and install everything, at the versions of constraints.txt

$(VENV)/installed: pyproject.toml constraints.txt
	@[ -z "$(IMAGE_VENV)" ] || { echo "$(VENV) is from make setup-gpu and has no book: rm -r $(VENV) first."; exit 1; }
	@$(PYTHON) tools/check_python.py
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): about two minutes the first time ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $$($(PYTHON) tools/torch_index.py) \
	  -c constraints.txt -e '.[all,torchft]'
	@# What pip does on one core, without the third that nobody imports; templates may fail.
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/|/torch/testing/_internal/|/transformers/models/' $(VENV)/lib >/dev/null || true
	@$(BIN)/python -c 'import matplotlib.pyplot' 2>/dev/null # builds the font cache, or a lab would print that it does
	@touch $@

.PHONY: clean
clean: ## Remove what was built; .venv, work/ and distributed-experiments/ stay
	@rm -rf _build .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	@find lablib tests labs tools _ext -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
