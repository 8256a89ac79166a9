# Needs Python 3.11 or newer with pip and venv, git and make. Everything else is installed into .venv, except Chromium:
# where it is not on the path, the tests that open pages are left out and counted.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
READY_FOR_ALL := $(VENV)/ready-for-all
EVERYTHING := .[book,dev]
NOTEBOOK := work/00-the-life-of-a-token.ipynb
WORKERS := 3
# Redirected, because make 3.81, which macOS has, runs a plain command without a shell.
WITHOUT := $(if $(shell command -v chromium 2>/dev/null),,chromium)
AS_ROOT := $(if $(filter 0,$(shell id -u 2>/dev/null)),--allow-root)

.PHONY: help
help: ## list the targets
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "The first one that needs it installs into $(VENV); PYTHON=python3.12 chooses another interpreter."

# -- to use it -------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(READY) ## answer eight chat prompts in one continuous batch
	@$(BIN)/python -m minisgl demo
	@echo
	@echo "What next? The book: make lab. A chat in this terminal: source $(VENV)/bin/activate, then python -m minisgl chat."
	@echo "A server with a page that shows what it does: make serve, then open http://127.0.0.1:1919/ui."

.PHONY: serve
serve: $(READY) ## start the server: an OpenAI-compatible API on port 1919
	@$(BIN)/python -m minisgl.serve --model default --port 1919 --in-process

.PHONY: lab
lab: $(READY_FOR_ALL) ## open your copies of the notebooks, in work/, in JupyterLab; delete a copy to begin it afresh
	@mkdir -p work
	@for each in notebooks/*.ipynb; do [ -e "work/$${each##*/}" ] || cp "$$each" work/; done
	@$(BIN)/jupyter trust work/*.ipynb >/dev/null  # else JupyterLab leaves the pictures out until a cell is run
	@$(BIN)/jupyter lab $(AS_ROOT) --ServerApp.root_dir=. $(NOTEBOOK)

.PHONY: bench
bench: $(READY_FOR_ALL) ## measure the engine on this machine's CPU; results land in benchmarks/results
	@$(BIN)/python -m minisgl.bench cpu
	@$(BIN)/python -m minisgl.bench host

.PHONY: bench-gpu
bench-gpu: $(READY_FOR_ALL) ## test and measure the engine on this machine's GPU, for about ten minutes
	$(BIN)/pytest -m gpu
	@for benchmark in "offline --start" compare kernels attention attention-steps batch-one fp8 overlap preemption profile; do $(BIN)/python -m minisgl.bench $$benchmark; done
	@$(BIN)/python -m minisgl.bench profile --model Qwen3-14B --output benchmarks/results/profile-14b.json
	@$(BIN)/python -m tools.readme

.PHONY: drafter
drafter: $(READY) ## train the drafter of the default model; MINUTES=5 on a GPU, 480 (a night) without one
	@$(BIN)/python -m tools.train_drafter --minutes $(or $(MINUTES),$(if $(shell command -v nvidia-smi 2>/dev/null),5,480))

# -- to work on it ---------------------------------------------------------------------------------------------------

.PHONY: test
test: $(READY_FOR_ALL) model ## run everything that CI runs
	@# First what keeps one core busy, side by side, then what runs in several processes.
	@$(MAKE) course & course=$$!; status=0; $(MAKE) lint check-pairs book || status=$$?; \
	wait $$course || status=$$?; exit $$status
	@$(MAKE) unit notebooks

.PHONY: lint
lint: $(READY_FOR_ALL) ## check style, format, types and the layers of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m tools.readme --check

.PHONY: model
model: $(READY) ## fetch the default model, unless it is in the cache
	@$(BIN)/python -c "from minisgl.models.hub import resolve_model; print('default model:', resolve_model('default'))"

.PHONY: unit
unit: $(READY_FOR_ALL) model ## run the tests of the package, in three processes; WORKERS=0 for one, as tests on a GPU need it
	@$(if $(WITHOUT),echo "Tests that need $(WITHOUT) are left out; they are counted at the end.")
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(WITHOUT:%=--without %)

.PHONY: course
course: $(READY_FOR_ALL) ## prove that the tasks of all chapters can be solved one after the other; CHAPTER=6 for one
	@OMP_NUM_THREADS=1 $(BIN)/python -m tools.course $(CHAPTER)

.PHONY: check-pairs
check-pairs: $(READY_FOR_ALL) ## generate the notebooks once more, and fail if one differs from what is there
	@$(BIN)/python -m tools.notebooks check

.PHONY: pair
pair: $(READY_FOR_ALL) ## generate the notebooks from the chapters; unchanged cells keep their outputs
	@$(BIN)/python -m tools.notebooks pair $(CHAPTER)

.PHONY: execute
execute: $(READY_FOR_ALL) model ## the same and run them, to keep new outputs; CHAPTER=06 for one
	@$(BIN)/python -m tools.notebooks run $(CHAPTER)

.PHONY: notebooks
notebooks: $(READY_FOR_ALL) ## run every notebook, two at a time on a core each; the assertions in them are the test
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --nbmake notebooks

.PHONY: book
book: $(READY_FOR_ALL) ## build the book's pages into book/: open book/index.html
	@$(BIN)/python -m tools.mdbook

.PHONY: clean
clean: ## remove .venv and everything that is generated
	rm -rf $(VENV) book build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- installing ------------------------------------------------------------------------------------------------------

# $(call install,WHAT) is one pip call, so that the pinned torch is in place before anything can ask for a newer one.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "minisgl needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -n 1)." >&2; \
		echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing minisgl into $(VENV), once. This takes minutes; the details are in $(VENV)/install.log"
	@$(PYTHON) -m venv $(VENV)
	@rm -f $(READY) $(READY_FOR_ALL)
	@set -euo pipefail; $(BIN)/pip install --disable-pip-version-check --no-input --progress-bar off -c constraints.txt -e '$(1)' 2>&1 \
		| tee $(VENV)/install.log \
		| awk '/^ *(Downloading|Processing) / && !/\.metadata/ { n = split($$2, path, "/"); print "  " path[n], $$3, $$4; fflush() } \
			/^Installing collected/ { print "  installing " NF - 3 " packages"; fflush() }' \
		|| { grep -v ^WARNING $(VENV)/install.log | tail -n 20 >&2; exit 1; }
	@touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call install,.)

$(READY_FOR_ALL): pyproject.toml constraints.txt
	$(call install,$(EVERYTHING))
	@touch $(READY)
