# One command shows everything: `make quickstart`. `make` alone lists what there is.

PYTHON ?= python3
# Where torch comes from. Empty: the index that pip is set up with. Say
#   make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu       no accelerator: spares gigabytes of CUDA libraries
#   make quickstart TORCH_INDEX=https://download.pytorch.org/whl/rocmX.Y   AMD, with the ROCm version that is installed
# the first time; later calls find torch installed. The version is the one in constraints.txt.
TORCH_INDEX ?=

DEMO := demo
VENV := .venv
INSTALLED := $(VENV)/.installed
TRAINED := $(DEMO)/run/checkpoints/latest_checkpointed_iteration.txt

# The commands below are those of the README: the environment is found through PATH.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
unexport PYTHONPATH

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install quickstart test test-all test-failed smoke test-docs reference faults lint clean force
# A checkpoint must outlive a Ctrl-C: the next call goes on from it.
.PRECIOUS: $(TRAINED)

help:
	@echo "make quickstart   from nothing to an encoder that fills masks, in $(DEMO)/; a second call goes on from what is there"
	@echo "make install      the virtual environment $(VENV) with this package and its tools"
	@echo "make test         the tests to run after every change: all that are not marked slow or system"
	@echo "make test-all     all tests; .ci/run runs these"
	@echo "make smoke        of them, a minute: a short run, resuming it, export, fine-tuning"
	@echo "make test-failed  of them, what the last call found failing, one test at a time"
	@echo "make test-docs    the commands of README and docs, in copies of this repository (DOCS=, LIST=1, KEEP=)"
	@echo "make reference    docs/api.md, docs/flags.md and docs/way.svg anew, from the docstrings and a script"
	@echo "make faults       kills short runs $(KILLS) times at random moments: each must end as if nothing had happened (KILLS=, SEED=)"
	@echo "make lint         ruff check, ruff format --check, shellcheck, hadolint"
	@echo "make clean        remove $(VENV), $(DEMO) and caches"
	@echo
	@echo "PYTHON=$(PYTHON)   the interpreter that $(VENV) is made with, 3.11 or 3.12"
	@echo "TORCH_INDEX=...   where torch comes from: https://download.pytorch.org/whl/cpu for a machine without accelerator"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt install.sh
	@PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH_INDEX='$(TORCH_INDEX)' EXTRAS=dev ./install.sh
	@touch $@

# ---- the quickstart: text, tokenizer, tokens, model, export, what it knows -----------------------------------------------

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
	  --objective-schedule clm:0.25,mlm:0.75 --tensor-model-parallel-size 2 --save $(DEMO)/run

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

# What the last `make test` or `make test-all` found failing, one test at a time.
test-failed: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m pytest --last-failed --last-failed-no-failures none

smoke: $(INSTALLED)
	OMP_NUM_THREADS=1 python -m pytest tests/smoke

# One document after the other. DOCS="docs/a.md docs/b.md": these alone; LIST=1: what is not run or replaced, and nothing else;
# KEEP=folder: work there, and do not run again what has passed there.
DOCS ?=
LIST ?=
KEEP ?=
test-docs: $(INSTALLED)
	PYTHONPATH=tests python -m docs.commands $(if $(LIST),--list) $(if $(KEEP),--keep '$(KEEP)') $(DOCS)

reference: $(INSTALLED)
	python docs/scripts/reference.py
	python docs/scripts/picture.py

# 100 kills took 25 minutes on two cores that were busy otherwise too.
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
