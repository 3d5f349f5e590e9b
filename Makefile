# `make quickstart` runs everything once; `make` lists the targets.

# Interpreter of the virtual environment; empty: install.sh looks for one.
PYTHON ?=
# Index that torch is installed from; empty: pip's own. Set it the first time, for example
#   make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu       no accelerator: avoids gigabytes of CUDA libraries
#   make quickstart TORCH_INDEX=https://download.pytorch.org/whl/rocmX.Y   AMD, with the installed ROCm version
# The version is pinned in constraints.txt.
TORCH_INDEX ?=

DEMO := demo
VENV := .venv
INSTALLED := $(VENV)/.installed
SITE := build/website
TRAINED := $(DEMO)/run/checkpoints/latest_checkpointed_iteration.txt

# The commands below are those of the README and find the environment through PATH.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
unexport PYTHONPATH

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install quickstart test test-all test-changed test-failed smoke test-docs reference docs faults lint clean force
# Keep checkpoints after Ctrl-C: the next call resumes from them.
.PRECIOUS: $(TRAINED)

help:
	@echo "make quickstart   train, export and try an encoder in $(DEMO)/; repeat the command to resume"
	@echo "make install      create the virtual environment $(VENV) with this package and its tools"
	@echo "make test         run the tests that are not marked slow or system (6 minutes on two cores)"
	@echo "make test-all     run all tests, as .ci/run does (25 minutes on two cores)"
	@echo "make smoke        run a short training, resume, export and fine-tuning (1 minute)"
	@echo "make test-changed run tests that are not slow and reach what changed since SINCE=$(SINCE), a revision"
	@echo "make test-failed  run the tests that failed last time, one at a time"
	@echo "make test-docs    run the commands of README and docs in copies of this repository (DOCS=, LIST=1, KEEP=)"
	@echo "make reference    write docs/api.md, docs/flags.md and docs/way.svg from the docstrings"
	@echo "make docs         build the documentation as a site in $(SITE)/site, with checked links (no .venv needed)"
	@echo "make faults       kill short runs $(KILLS) times at random moments and check their results (KILLS=, SEED=)"
	@echo "make lint         run ruff check, ruff format --check, shellcheck, hadolint"
	@echo "make clean        remove $(VENV), $(DEMO) and caches"
	@echo
	@echo "PYTHON=...        interpreter for $(VENV); default: the first of python3, python3.13, python3.12, python3.11 that works"
	@echo "TORCH_INDEX=...   index for torch: https://download.pytorch.org/whl/cpu without an accelerator"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt install.sh
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH_INDEX='$(TORCH_INDEX)' EXTRAS=dev ./install.sh
	@touch $@

# ---- quickstart: text, tokenizer, corpus, training, export, predictions -----------------------------------------------

quickstart: $(INSTALLED) $(DEMO)/hf/config.json $(DEMO)/loss.png
	megaenc fill-mask --model $(DEMO)/hf --input $(DEMO)/heldout.jsonl
	megaenc summary $(DEMO)/run

$(DEMO)/corpus.jsonl: | $(INSTALLED)
	megaenc demo --output $(DEMO)

$(DEMO)/tokenizer/tokenizer.json: | $(DEMO)/corpus.jsonl
	megaenc tokenizer --input $(DEMO)/corpus.jsonl --vocab-size 8192 --output $(DEMO)/tokenizer

# The .idx is the last of the three files to get its name.
$(DEMO)/corpus_text_document.idx: | $(DEMO)/tokenizer/tokenizer.json
	python tools/preprocess_data.py --input $(DEMO)/corpus.jsonl --output-prefix $(DEMO)/corpus \
	  --tokenizer $(DEMO)/tokenizer --append-eod

# Always asked: a run that is whole says so, one that was cut off goes on.
$(TRAINED): force | $(DEMO)/corpus_text_document.idx
	OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/pretrain_encoder.py --config configs/pretrain/tiny.yaml \
	  --data-path $(DEMO)/corpus_text_document --tokenizer $(DEMO)/tokenizer \
	  --objective-schedule clm:0.25,mlm:0.75 --save $(DEMO)/run

$(DEMO)/hf/config.json: $(TRAINED)
	@rm -rf $(DEMO)/hf
	python tools/convert_checkpoint.py to-hf --load $(DEMO)/run --output $(DEMO)/hf

$(DEMO)/loss.png: $(TRAINED)
	megaenc plot $(DEMO)/run --output $(DEMO)/loss.png

# ---- for those who change it ---------------------------------------------------------------------------------------------

TESTS := OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal

test: $(INSTALLED)
	$(TESTS) -m "not slow and not system"

test-all: $(INSTALLED)
	$(TESTS)

SINCE ?= HEAD
CHANGED := .pytest_cache/changed
test-changed: $(INSTALLED)
	@mkdir -p $(dir $(CHANGED))
	python tests/changed.py $(SINCE) >$(CHANGED)
	@if [ -s $(CHANGED) ]; then $(TESTS) -m "not slow and not system" @$(CHANGED); else echo "no test reaches what changed"; fi

# What the last `make test` or `make test-all` found failing, one test at a time.
test-failed: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m pytest --last-failed --last-failed-no-failures none

smoke: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m pytest tests/smoke

# DOCS="docs/a.md docs/b.md": only these documents; LIST=1: only list commands that are skipped or replaced;
# KEEP=directory: work in this directory and skip the commands that passed there before.
DOCS ?=
LIST ?=
KEEP ?=
test-docs: $(INSTALLED)
	PYTHONPATH=tests python -m docs.commands $(if $(LIST),--list) $(if $(KEEP),--keep '$(KEEP)') $(DOCS)

reference: $(INSTALLED)
	python docs/scripts/reference.py
	python docs/scripts/picture.py

# The tools that build the site have an environment of their own, so that the package's does not change.
$(SITE)/venv/.installed: pyproject.toml
	$(or $(PYTHON),python3) -m venv $(SITE)/venv
	$(SITE)/venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"] \
	  ["optional-dependencies"]["docs"])' | xargs $(SITE)/venv/bin/pip install --quiet --disable-pip-version-check
	@touch $@

docs: $(SITE)/venv/.installed
	PYTHONPATH=tests $(SITE)/venv/bin/python docs/scripts/website.py
	NO_MKDOCS_2_WARNING=1 $(SITE)/venv/bin/mkdocs build --config-file $(SITE)/mkdocs.yml
	@echo "open $(SITE)/site/index.html; for its search: python3 -m http.server --directory $(SITE)/site"

# 100 kills took 25 minutes on two busy cores.
KILLS ?= 100
SEED ?= 0
faults: $(INSTALLED)
	PYTHONPATH=tests OMP_NUM_THREADS=1 python -m faults.campaign --kills $(KILLS) --seed $(SEED)

lint: $(INSTALLED)
	ruff check
	ruff format --check
	shellcheck --external-sources install.sh docker/*.sh docker/slurm/*.sh docker/slurm/*.sbatch benchmarks/gpu.sh .ci/run
	hadolint docker/Dockerfile.*

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .ruff_cache
