"""Run a study: pretraining, exports with certificate, and fine-tuning.

Each stage starts once the stages that it needs are done.

megaenc study run configs/study/mini.yaml --output study
megaenc study status configs/study/mini.yaml --output study

Rerun the same command to resume after a kill or a failure, or with more models in the manifest;
finished stages are kept.
"""

import fnmatch
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.atomic_io import try_lock
from megaenc.console import format_duration, print_rank_0, silence_libraries
from megaenc.data.packing.data_path import find_corpora, list_prefixes
from megaenc.errors import InputError, closest_match, handle_command_errors
from megaenc.finetune.grid.cluster import ClusterConfig
from megaenc.flags import NonNegativeInt
from megaenc.machine import (
    accelerator_names,
    check_process_count,
    select_visible_devices,
    usable_core_count,
)
from megaenc.output_paths import create_parent_with_rollback
from megaenc.processes import exit_on_sigterm, python_command
from megaenc.study.manifest.pretrain_args import resolve_flag_paths
from megaenc.study.manifest.schema import Manifest, read_manifest
from megaenc.study.plan.dag import build_graph
from megaenc.study.run.embed_stage import check_embed_data
from megaenc.study.run.executor import execute_stages, with_dependencies
from megaenc.study.run.finetune_stage import FinetuneStage
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.study.run.slurm import submit_stages
from megaenc.study.run.stage import (
    CorpusStage,
    StageRunner,
    check_stages,
    finished_stages,
    format_flags,
    strip_training_set,
)


@dataclass(frozen=True)
class StudyRunConfig:
    """Flags of `megaenc study run`, as `main` parses them.

    `manifest`, the positional argument, is a YAML file, `output` the study directory, which is
    required, `data` the start of relative data paths ("" is the manifest's directory). `data_path`,
    a tuple, and `tokenizer` name a corpus if the manifest builds none. `jobs` is the number of
    parallel stages (0: one per GPU or core), `processes` that of processes per pretraining run (0:
    the manifest's). `only`, a tuple of names, limits the stages (`select_stages`; () runs all),
    `dry_run` only lists them, `slurm` (ClusterConfig) submits them to a cluster.
    """

    manifest: Annotated[str, Positional, arg(metavar="MANIFEST")]
    """The study as a YAML file, or the name of a packaged one such as study/mini."""
    output: str = ""
    """Study directory for runs, exports, results and logs."""
    data: str = ""
    """Directory that relative data paths of the manifest start from; default: that of the file, or
    the current one for a packaged manifest."""
    data_path: tuple[str, ...] = ()
    """Pretraining corpus, as --data-path of `megaenc pretrain`, if the manifest builds none;
    overrides the manifest's.
    """
    tokenizer: str = ""
    """Tokenizer of this corpus: a directory or a name."""
    jobs: NonNegativeInt = 0
    """Stages in parallel; 0: one per GPU, or without GPUs one per core."""
    processes: NonNegativeInt = 0
    """Processes per pretraining run, each on its own GPU; 0: `hardware: devices` of the manifest.
    """
    only: tuple[str, ...] = ()
    """Models, checkpoints or stages (pretrain/NAME) to run, with all that they need; * and ? are
    wildcards.
    """
    dry_run: bool = False
    """Print the state and the remaining commands of each stage, and do nothing."""
    slurm: ClusterConfig = field(default_factory=ClusterConfig)
    """submission to Slurm"""


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Execute, submit (--slurm) or list (--dry-run) the remaining stages of a study.

    Finished stages are kept. After a failed stage, those that do not need it still run, and the
    exit code is 1; after wrong input it is 2. With --slurm it may return before the stages end.

    Args:
        argv: The flags, without the name of the command; None: those of this process.
    """
    silence_libraries()
    settings = flags.parse(StudyRunConfig, argv, prog="megaenc study run", description=__doc__)
    study = resolve_study_dir(settings.output, "run")
    cluster = settings.slurm
    if not cluster.slurm:  # other machines may have more cores
        check_process_count("--jobs", settings.jobs)
        check_process_count("--processes", settings.processes)
    _check_cluster(cluster, settings.jobs)
    manifest = read_manifest(settings.manifest, settings.data or None)
    data_flags = _resolve_data_flags(manifest, settings)
    stages = build_graph(
        manifest,
        study,
        processes=settings.processes,
        grid_jobs=0 if cluster.slurm else 1,
        data_flags=data_flags,
    ).stages
    chosen = select_stages(stages, settings.only)
    check_stages(chosen, stages, study)
    if settings.dry_run:
        _print_dry_run(chosen)
        return
    _check_data(chosen, settings.manifest)
    lock = study / ".locks" / "study"
    with (
        exit_on_sigterm(),
        create_parent_with_rollback(lock, "--output"),
        try_lock(lock) as is_locked,
    ):
        if not is_locked:
            raise InputError(
                f"--output {study}: another `megaenc study run` uses this directory; wait for it "
                "or stop it"
            )
        if cluster.slurm:
            submit_stages(chosen, study, cluster)
        else:
            _run_locally(chosen, study, settings)


def _check_cluster(cluster: ClusterConfig, jobs: int) -> None:
    """Raise InputError for flags that have no effect with or without --slurm."""
    if cluster.slurm and jobs:
        raise InputError(
            "--jobs: found together with --slurm, expected --slurm-parallel, the number of "
            "parallel tasks of a grid"
        )
    for option in fields(cluster):
        if not cluster.slurm and getattr(cluster, option.name) != option.default:
            flag = f"--{option.name.replace('_', '-')}"
            raise InputError(f"{flag}: found without --slurm, expected --slurm as well")


def _resolve_data_flags(manifest: Manifest, settings: StudyRunConfig) -> dict[str, Any]:
    """Return data_path and tokenizer for pretraining from the command line.

    Raises:
        InputError: The manifest builds its own, or neither the manifest nor the command line names
            them.
    """
    data_flags = {}
    for name in ("data_path", "tokenizer"):
        flag = f"--{name.replace('_', '-')}"
        value = getattr(settings, name)
        if value:
            if manifest.corpus.is_built_by_study:
                raise InputError(
                    f"{flag}: found here, but {settings.manifest} builds its own corpus; expected "
                    "only one of them"
                )
            data_flags[name] = value
        elif not manifest.corpus.is_built_by_study:
            for model in manifest.models:
                if not model.flags.get(name):
                    raise InputError(
                        f"{flag}: missing, and {settings.manifest} has no `{name}` for "
                        f"{model.name}; expected a corpus of `megaenc preprocess` and its "
                        "tokenizer, or a `corpus` of text in the manifest"
                    )
    return resolve_flag_paths(data_flags, Path.cwd())


def _check_data(stages: Sequence[StageRunner], manifest: str) -> None:
    """Raise InputError for missing data that a remaining stage reads.

    Data are text, corpora, tokenizers, retrieval sets and pairs.
    """
    check_embed_data(stages, manifest)
    remaining = [stage for stage in stages if not stage.is_done()]
    corpora = [stage for stage in remaining if isinstance(stage, CorpusStage)]
    for path in [path for corpus in corpora for path in corpus.text]:
        if not os.path.exists(path):  # False for a name that is too long
            raise InputError(
                f"{manifest}: corpus: field `text`: {path}: no such file or directory; expected "
                "text (see --data)"
            )
    to_train = [
        stage.flags
        for stage in remaining
        if isinstance(stage, PretrainStage) and not stage.has_study_corpus
    ]
    for data_path in dict.fromkeys(
        tuple(map(str, train_flags["data_path"])) for train_flags in to_train
    ):
        for prefix in list_prefixes(find_corpora(data_path)):
            if not os.path.exists(f"{prefix}.idx"):
                expected = "the prefix of a corpus of `megaenc preprocess`"
                raise InputError(f"--data-path {prefix}: no {prefix}.idx; expected {expected}")
    for tokenizer in dict.fromkeys(str(train_flags["tokenizer"]) for train_flags in to_train):
        from megaenc.data.tokenizer.tokenizer import load_tokenizer

        load_tokenizer(tokenizer)


def _print_dry_run(stages: Sequence[StageRunner]) -> None:
    """Print the state and the remaining commands of each stage.

    Commands are one per line, as they can be typed.
    """
    done = finished_stages(stages)
    start = python_command("-m")
    for stage in stages:
        if stage.id in done:
            print_rank_0(f"{stage.id}: done")
        elif stage.is_done():
            print_rank_0(
                f"{stage.id}: exists, and would be compared with {' and '.join(stage.needs)}"
            )
        else:
            part, total = stage.progress()
            progress = f" ({part:,.0f} of {total:,.0f} {stage.unit} are done)" if part else ""
            for command in stage.remaining_commands():
                program, *words = command[len(start) :]
                typed = "torchrun" if program == "torch.distributed.run" else program
                print_rank_0(f"{stage.id}: would run{progress}: {shlex.join([typed, *words])}")


def _run_locally(stages: Sequence[StageRunner], study: Path, settings: StudyRunConfig) -> None:
    """Run `stages` on this machine and print the summary."""
    slots = device_slots(settings.jobs)
    start_time = time.monotonic()
    done = len(finished_stages(stages))
    print_rank_0(
        f"{study}: {len(stages):,} stages, {done:,} done, {len(stages) - done:,} to do, "
        f"{len(slots)} in parallel"
    )
    try:
        failed = execute_stages(stages, study, slots)
    except (KeyboardInterrupt, SystemExit):
        print_rank_0("finished stages are kept; rerun the same command to resume")
        raise
    print_summary(stages, study, failed, time.monotonic() - start_time, settings)


def print_summary(
    stages: Sequence[StageRunner],
    study: Path,
    failed: Mapping[str, str],
    seconds: float,
    settings: StudyRunConfig,
) -> None:
    """Print failures, counts, and the report command if all of `stages` are done.

    Args:
        stages: Stages of this execution, each after those that it needs.
        study: Study directory.
        failed: Reasons of failures by stage id, as of `execute_stages`.
        seconds: Duration of this execution.
        settings: Flags of this command; the report command names their manifest.

    Raises:
        SystemExit: A stage is not done; the exit code is 1.
    """
    done = finished_stages(stages).difference(failed)
    for stage in stages:
        if isinstance(stage, FinetuneStage) and stage.is_done():
            sentence = stage.describe_failed_runs()
            if sentence:
                print_rank_0(f"{stage.id}: {sentence}")
    for id, reason in failed.items():
        print_rank_0(f"failed: {id}: {reason}")
    waiting = [stage.id for stage in stages if stage.id not in done and stage.id not in failed]
    if waiting:
        print_rank_0(f"not run, because a stage that they need failed: {', '.join(waiting)}")
    print_rank_0(
        f"{len(done):,} of {len(stages):,} stages are done, in {format_duration(seconds)} this time"
    )
    if failed or waiting:
        print_rank_0("rerun the same command to retry failed stages and continue")
        sys.exit(1)
    paths = {"results": study / "results", "runs": study / "runs", "output": study / "report"}
    command = ["megaenc", "study", "report", settings.manifest, *format_flags(paths)]
    print_rank_0(f"for a report, run `{shlex.join(command)}`")


def resolve_study_dir(output: str, command: str) -> Path:
    """Return the study directory --output as an absolute path, without creating it.

    Args:
        command: Subcommand of `megaenc study` whose --help an error names.

    Raises:
        InputError: `output` is empty, is a file, is in one, or cannot be looked up.
    """
    if not output:
        raise InputError(
            f"--output: missing, expected the study directory; see megaenc study {command} --help"
        )
    study = Path(output).absolute()
    try:
        nearest = next(directory for directory in (study, *study.parents) if directory.exists())
    except OSError as error:
        raise InputError(
            f"--output {output}: {error.strerror}; expected the study directory"
        ) from None
    if not nearest.is_dir():
        raise InputError(f"--output {output}: {nearest} is a file; expected the study directory")
    return study


def select_stages(stages: Mapping[str, StageRunner], only: Sequence[str]) -> list[StageRunner]:
    """Return the stages whose id or name matches any of `only`, and their needs.

    Needs are direct and indirect. All stages are returned if `only` is empty. The order is that of
    `stages`.

    Args:
        stages: Stages by id, each after those that it needs.
        only: Names of models and checkpoints, or stage ids, of grids also without `@SET`; * and ?
            are wildcards.

    Raises:
        InputError: A pattern has no match.
    """
    ids: list[str] = [] if only else list(stages)
    names = {id: strip_training_set(id).rpartition("/")[2] for id in stages}
    for pattern in only:
        matches = []
        for id, name in names.items():
            if any(
                fnmatch.fnmatchcase(text, pattern) for text in (id, strip_training_set(id), name)
            ):
                matches.append(id)
        if not matches:
            near = closest_match(pattern, [*names.values(), *names])
            hint = f"did you mean {near}?" if near else "expected a name in `megaenc study plan`"
            raise InputError(f"--only: found {pattern}, {hint}")
        ids += matches
    return with_dependencies(stages, ids)


def device_slots(jobs: int) -> list[str]:
    """Return the GPU for each of `jobs` parallel processes, one text per process.

    GPUs are entries of HIP_VISIBLE_DEVICES or else CUDA_VISIBLE_DEVICES, or 0, 1, ... if neither is
    set, and used in turn if there are more processes. Each text is "" if there is no GPU.

    Args:
        jobs: Number of processes; 0: one per GPU, or without GPUs one per core that is usable.

    Raises:
        InputError: torch fails to list the GPUs.
    """
    devices = select_visible_devices(len(accelerator_names()))[1]
    count = jobs or len(devices) or usable_core_count()
    return [devices[index % len(devices)] if devices else "" for index in range(count)]
