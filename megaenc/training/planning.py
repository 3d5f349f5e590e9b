"""Building of a plan from the configuration, before any process group exists."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from megaenc.backend.device import Backend, detect_backend, has_float8, peak_bf16_flops
from megaenc.console import print_rank_0
from megaenc.data.indexed.corpus import Corpus, refuse_raw_text
from megaenc.data.packing.builder import RunData, check_same_special_tokens
from megaenc.data.packing.data_path import find_corpora, list_prefixes, parse_data_path
from megaenc.data.packing.validation_sets import ValidationSet, parse_valid_data_path
from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
from megaenc.dist_env import get_world_size
from megaenc.errors import InputError
from megaenc.objectives import Schedule, check_targets
from megaenc.training.callbacks.registry import parse_callbacks
from megaenc.training.config import PretrainConfig
from megaenc.training.config_groups import DataConfig
from megaenc.training.parent_run import record_run_init, resolve_run_init
from megaenc.training.phases import build_learning_rate
from megaenc.training.plan import Plan
from megaenc.training.skip_policy import resolve_skip_ranges

_NAMED_CORPORA = 6  # in lines about several


def build_plan(settings: PretrainConfig, given: Collection[str] | None = None) -> Plan:
    """Return the Plan of a run, after checks of settings, data and parent run.

    Each rank calls it for itself, before the process group exists; the number of processes is that
    of torchrun's variables. Without --data-path it uses demo/ in the working directory, built if
    missing (by one rank of each machine); a dry run raises InputError instead of building it.

    Args:
        given: Names of the fields that the user has set; None for all. A field of rotary positions
            that is not among them must equal that of the run of --init-from.

    Raises:
        InputError: Settings, data or parent run do not fit.
    """
    settings.check(get_world_size())
    parse_callbacks(settings.monitoring.callbacks)
    if not settings.output.dry_run:
        check_device(settings, detect_backend())
    gpu = settings.output.gpu
    if gpu and not settings.output.dry_run:
        raise InputError(
            "--gpu: found without --dry-run; a run takes the devices of its machines, so leave "
            "the flag out"
        )
    if gpu and not peak_bf16_flops(gpu):
        raise InputError(
            f"--gpu: found {gpu}, expected a device type such as h100 or mi250x, which `--help` "
            "lists"
        )
    learning_rate = build_learning_rate(settings)

    # Tokenizer and schedule.
    data_configs, tokenizer_name = _resolve_data(settings)
    sources = [source for data in data_configs for source in find_corpora(data.data_path)]
    validation_paths = parse_valid_data_path(settings.output.valid_data_path)
    for prefix in dict.fromkeys((*list_prefixes(sources), *validation_paths.values())):
        refuse_raw_text(prefix)  # also without --tokenizer, which the corpus decides
    if not tokenizer_name:
        raise InputError(
            "--tokenizer: missing, expected the tokenizer that the corpus was built with: a "
            "directory or a name"
        )
    tokenizer = load_tokenizer(tokenizer_name)
    vocabulary = read_vocabulary(tokenizer)
    rows = settings.shape.vocab_size
    if rows is not None and rows < vocabulary.size:
        raise InputError(
            f"--vocab-size: found {rows}, expected at least the {vocabulary.size} ids of "
            f"--tokenizer {tokenizer_name}"
        )
    schedule = Schedule.build(
        settings.schedule_text, settings.total_iters, vocabulary, settings.seed
    )

    # Corpora of each phase, and of validations.
    corpora: dict[str, Corpus] = {}
    opened = {
        data: RunData.open(
            data.data_path,
            vocabulary,
            split=data.split,
            packing=data.packing,
            seq_length=data.seq_length,
            seed=settings.seed,
            order=data.data_order,
            temperature=data.blend_temperature,
            max_epochs=data.blend_max_epochs,
            opened=corpora,
        )
        for data in dict.fromkeys(data_configs)
    }
    parts = list(opened.values())
    train_fingerprints = {corpus.fingerprint for data in parts for corpus in data.corpora}
    validation_sets = []
    for name, prefix in validation_paths.items() if settings.eval_every else ():
        validation_sets.append(
            ValidationSet.open(
                name,
                prefix,
                vocabulary,
                split=settings.data.split,
                order=settings.data.data_order,
                train_fingerprints=train_fingerprints,
                opened=corpora,
            )
        )
    _check_special_tokens(parts, validation_sets)

    # Plan, and its starting point and skipped packs.
    by_phase = [opened[data] for data in data_configs] if len(parts) > 1 else parts
    plan = Plan(
        settings,
        vocabulary,
        tokenizer,
        by_phase[-1],
        schedule,
        learning_rate,
        earlier_data=tuple(by_phase[:-1]),
        validation_sets=tuple(validation_sets),
    )
    objectives = (
        schedule.initial_objectives() | schedule.final_objectives() | plan.validation_objectives
    )
    for objective in objectives.values():
        for data in parts:
            for sample in range(2):
                check_targets(objective, data.train[sample], settings.seed)
    start = resolve_run_init(plan, given)
    plan = dataclasses.replace(plan, settings=record_run_init(settings, start), start=start)
    plan = plan.with_skipped(*resolve_skip_ranges(plan))
    plan.check_supply()
    return plan


def check_device(settings: PretrainConfig, backend: Backend) -> None:
    """Raise InputError for settings that the device does not support.

    With --gpu, the device type that a dry run plans for, only the FP8 format is checked, for that
    type, and `backend` is unused. Without --gpu, overlapping communication and `--micro-batch-size
    auto` are checked, for `backend`, this machine's (`detect_backend`); FP8 is left to the Engine.
    """
    gpu = settings.output.gpu
    fp8_format = settings.kernels.fp8_format
    if gpu:
        if fp8_format and not has_float8(gpu):
            raise InputError(
                f"--fp8-format {fp8_format}: {gpu} has no float8 matrix products; leave the flag "
                "out"
            )
        return
    settings.layout.check_device()
    if settings.has_auto_micro_batches and backend.is_cpu:
        raise InputError(
            "--micro-batch-size auto: fills the memory of an accelerator, and this machine has "
            "none; expected a number of packs"
        )


def _check_special_tokens(
    parts: Sequence[RunData], validation_sets: Sequence[ValidationSet]
) -> None:
    """Raise InputError for corpora with different special tokens.

    Those of corpora that do not record them are printed.
    """
    first = parts[0].corpora[0].prefix, parts[0].special_tokens
    for data in parts:
        check_same_special_tokens(*first, data.corpora[0].prefix, data.special_tokens)
    for held_out in validation_sets:
        check_same_special_tokens(
            *first, held_out.corpus.prefix, held_out.special_tokens, "--valid-data-path"
        )
    corpora = [corpus for data in parts for corpus in data.corpora] + [
        held_out.corpus for held_out in validation_sets
    ]
    prefixes = dict.fromkeys(corpus.prefix for corpus in corpora if not corpus.metadata)
    mode = f"--special-tokens {parts[0].special_tokens.mode}"
    for prefix in list(prefixes)[:_NAMED_CORPORA]:
        print_rank_0(f"{prefix}: records no special tokens; by its documents {mode}")
    if len(prefixes) > _NAMED_CORPORA:
        print_rank_0(
            f"{len(prefixes) - _NAMED_CORPORA:,} more corpora record no special tokens; by their "
            f"documents {mode}"
        )


def _resolve_data(settings: PretrainConfig) -> tuple[list[DataConfig], str]:
    """Return the DataConfig of each phase and the tokenizer's name.

    Without --data-path, or without --tokenizer for a --data-path of only demo corpora, these are
    the demo's, built if missing.
    """
    data_configs = [phase.settings.data for phase in settings.phase_configs]
    given = [data.data_path for data in data_configs if data.data_path]
    if len(given) == len(data_configs) and settings.data.tokenizer:
        return data_configs, settings.data.tokenizer
    from megaenc.data.demo import DemoPaths, ensure_demo, find_demo_parts

    directory = Path("demo")
    parts = find_demo_parts(
        [word for data_path in given for _, word in parse_data_path(data_path)], directory
    )
    if parts is None and len(given) == len(data_configs):
        return data_configs, ""
    demo = DemoPaths.in_directory(directory)
    parts = parts or ()
    if settings.output.dry_run:
        for prefix in (demo.data_prefix, *map(demo.part_prefix, parts)):
            if not Path(f"{prefix}.idx").exists():
                missing = "corpus" if prefix == demo.data_prefix else prefix.name
                hint = "give --data-path, or start a run without --dry-run, which builds it"
                raise InputError(f"--dry-run: demo/ holds no {missing} yet; {hint}")
    if settings.data.tokenizer:
        raise InputError(
            "--data-path: missing, expected the prefix of a corpus built with --tokenizer "
            "(tools/preprocess_data.py)"
        )
    ensure_demo(directory, parts=parts)
    path = (str(demo.data_prefix),)
    return [
        dataclasses.replace(data, data_path=data.data_path or path) for data in data_configs
    ], str(demo.tokenizer)
