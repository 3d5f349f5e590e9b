"""Do a study: pretraining, exports with certificate, fine-tuning, each stage when what it needs is done.

megaenc study run configs/study/mini.yaml --output study
megaenc study status configs/study/mini.yaml --output study

What is finished is not done again: the same command goes on after a kill, a failure, or with more models in the manifest.
"""

import fnmatch
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.atomic_io import exit_on_sigterm, try_lock
from megaenc.console import format_duration, print_rank_0, silence_libraries
from megaenc.data.packing.blended_dataset import parse_data_path
from megaenc.errors import InputError, closest_match, handle_command_errors
from megaenc.finetune.grid.slurm import ClusterConfig
from megaenc.output_paths import create_parent_with_rollback
from megaenc.processes import accelerator_names, check_process_count, python_command, select_visible_devices, usable_core_count
from megaenc.study.manifest.pretrain_args import resolve_flag_paths
from megaenc.study.manifest.schema import Manifest, read_manifest
from megaenc.study.plan.dag import build_graph
from megaenc.study.run.executor import execute_stages, with_dependencies
from megaenc.study.run.finetune_stage import FinetuneStage
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.study.run.slurm import submit_stages
from megaenc.study.run.stage import CorpusStage, StageRunner, check_stages, finished_stages


@dataclass(frozen=True)
class StudyRunConfig:
    """What `megaenc study run` takes."""

    manifest: Annotated[str, Positional, arg(metavar="MANIFEST")]
    """The study as a YAML file: configs/study/*.yaml."""
    output: str = ""
    """Folder of the study: runs, exports, results and logs."""
    data: str = ""
    """Folder in which the manifest's relative paths of data begin; the manifest's own unless given."""
    data_path: tuple[str, ...] = ()
    """Corpus to pretrain on as --data-path of `megaenc pretrain`, where the manifest makes none; it wins over the manifest's."""
    tokenizer: str = ""
    """Tokenizer that this corpus was made with: a folder or a name."""
    jobs: int = 0
    """Stages at a time; 0: one for each GPU, without one a stage on every core."""
    processes: int = 0
    """Processes of one pretraining run, each on a GPU of its own; 0: the manifest's `hardware: devices`."""
    only: tuple[str, ...] = ()
    """Names of models or checkpoints, or stages as pretrain/NAME; * and ? stand for others. What they need is done too."""
    dry_run: bool = False
    """Say what would be done, and do nothing."""
    slurm: ClusterConfig = field(default_factory=ClusterConfig)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc study run`; ends with exit code 1 if something could not be done."""
    silence_libraries()
    settings = flags.parse(StudyRunConfig, argv, prog="megaenc study run", description=__doc__)
    study, cluster = resolve_study_dir(settings.output, "run"), settings.slurm
    for flag, value in (("--jobs", settings.jobs), ("--processes", settings.processes)):
        if value < 0:
            raise InputError(f"{flag}: found {value}, expected 0 or more")
        if not cluster.slurm:  # whose machines have other cores
            check_process_count(flag, value)
    _check_cluster(cluster, settings.jobs)
    manifest = read_manifest(settings.manifest, settings.data or None)
    text = _resolve_data_flags(manifest, settings)
    stages = build_graph(
        manifest, study, processes=settings.processes, grid_jobs=0 if cluster.slurm else 1, data_flags=text
    ).stages
    chosen = select_stages(stages, settings.only)
    check_stages(chosen, stages, study)
    if settings.dry_run:
        _print_dry_run(chosen)
        return
    _check_data(chosen, settings.manifest)
    lock = study / ".locks" / "study"
    with exit_on_sigterm(), create_parent_with_rollback(lock, "--output"), try_lock(lock) as mine:
        if not mine:
            raise InputError(f"--output {study}: another `megaenc study run` is at this folder; wait for it or stop it")
        if cluster.slurm:
            submit_stages(chosen, study, cluster)
        else:
            _run_locally(chosen, study, settings)


def _check_cluster(cluster: ClusterConfig, jobs: int) -> None:
    """Raise InputError for numbers that cannot be, and for flags that would change nothing."""
    cluster.check()
    if cluster.slurm and jobs:
        instead = "--slurm-parallel says how many tasks of a grid go at a time"
        raise InputError(f"--jobs: found beside --slurm, expected nothing: {instead}")
    for one in fields(cluster):
        if not cluster.slurm and getattr(cluster, one.name) != one.default:
            raise InputError(f"--{one.name.replace('_', '-')}: found without --slurm, expected --slurm beside it")


def _resolve_data_flags(manifest: Manifest, settings: StudyRunConfig) -> dict[str, Any]:
    """Return data_path and tokenizer that the flags give pretraining.

    Raises InputError for what the manifest has no use for, and where neither says what is trained on.
    """
    given = {name: value for name in ("data_path", "tokenizer") if (value := getattr(settings, name))}
    for name in ("data_path", "tokenizer"):
        flag = f"--{name.replace('_', '-')}"
        if manifest.corpus.is_built_by_study:
            if name in given:
                raise InputError(f"{flag}: found here, and {settings.manifest} makes its own corpus; expected one")
        elif name not in given and (without := [model.name for model in manifest.models if not model.flags.get(name)]):
            raise InputError(
                f"{flag}: missing, and {settings.manifest} says no `{name}` for {without[0]}; expected a "
                "corpus of `megaenc preprocess` and its tokenizer, or a `corpus` of text in the manifest"
            )
    return resolve_flag_paths(given, Path.cwd())


def _check_data(stages: Sequence[StageRunner], manifest: str) -> None:
    """Raise InputError for text, a corpus or a tokenizer that `stages` are yet to read and that is missing."""
    left = [stage for stage in stages if not stage.is_done()]
    for path in [path for stage in left if isinstance(stage, CorpusStage) for path in stage.text]:
        if not path.exists():
            raise InputError(f"{manifest}: corpus: field `text`: {path}: no such file or folder; expected text (see --data)")
    to_train = [stage.flags for stage in left if isinstance(stage, PretrainStage) and not stage.has_study_corpus]
    for data_path in dict.fromkeys(tuple(map(str, each["data_path"])) for each in to_train):
        for _, prefix in parse_data_path(data_path):
            if not Path(f"{prefix}.idx").exists():
                expected = "the prefix of a corpus of `megaenc preprocess`"
                raise InputError(f"--data-path {prefix}: no {prefix}.idx; expected {expected}")
    for tokenizer in dict.fromkeys(str(each["tokenizer"]) for each in to_train):
        from megaenc.data.tokenizer.tokenizer import load_tokenizer

        load_tokenizer(tokenizer)


def _print_dry_run(stages: Sequence[StageRunner]) -> None:
    """Say the state of each stage, with a command, as a person would type it, to a line."""
    done, start = finished_stages(stages), python_command("-m")
    for stage in stages:
        if stage.id in done:
            print_rank_0(f"{stage.id}: done")
        elif stage.is_done():
            print_rank_0(f"{stage.id}: is there, and would be compared with {' and '.join(stage.needs)}")
        else:
            part, total = stage.progress()
            begun = f" ({part:,.0f} of {total:,.0f} {stage.unit} are done)" if part else ""
            for command in stage.remaining_commands():
                program, *words = command[len(start) :]
                typed = "torchrun" if program == "torch.distributed.run" else program
                print_rank_0(f"{stage.id}: would run{begun}: {shlex.join([typed, *words])}")


def _run_locally(stages: Sequence[StageRunner], study: Path, settings: StudyRunConfig) -> None:
    """Do `stages` on this machine and say how it went."""
    slots, began = device_slots(settings.jobs), time.monotonic()
    left = len(stages) - len(finished_stages(stages))
    print_rank_0(f"{study}: {len(stages):,} stages, {len(stages) - left:,} done, {left:,} to do, {len(slots)} at a time")
    try:
        failed = execute_stages(stages, study, slots)
    except (KeyboardInterrupt, SystemExit):
        print_rank_0("what is finished is kept; the same command goes on with the rest")
        raise
    print_summary(stages, study, failed, time.monotonic() - began, settings)


def print_summary(
    stages: Sequence[StageRunner], study: Path, failed: Mapping[str, str], seconds: float, settings: StudyRunConfig
) -> None:
    """Say what is missing and what to do next. Ends with exit code 1 if something is."""
    done = finished_stages(stages).difference(failed)
    for stage in stages:
        if isinstance(stage, FinetuneStage) and stage.is_done() and (count := stage.count_failed_runs()):
            print_rank_0(f"{stage.id}: {count} runs without a score: their rate made the loss no number")
    for id, why in failed.items():
        print_rank_0(f"failed: {id}: {why}")
    if waiting := [stage.id for stage in stages if stage.id not in done and stage.id not in failed]:
        print_rank_0(f"not done, as they need what failed: {', '.join(waiting)}")
    print_rank_0(f"{len(done):,} of {len(stages):,} stages are done, in {format_duration(seconds)} this time")
    if failed or waiting:
        print_rank_0("the same command tries again what failed, and goes on")
        sys.exit(1)
    where = ["--results", study / "results", "--runs", study / "runs", "--output", study / "report"]
    print_rank_0(f"read them with `{shlex.join(map(str, ['megaenc', 'study', 'report', settings.manifest, *where]))}`")


def resolve_study_dir(output: str, command: str) -> Path:
    """Return the study's folder as an absolute path, which jobs elsewhere need. Raises InputError for a file or no path."""
    if not output:
        raise InputError(f"--output: missing, expected the folder of the study; see megaenc study {command} --help")
    study = Path(output).absolute()
    try:
        nearest = next(folder for folder in (study, *study.parents) if folder.exists())
    except OSError as error:
        raise InputError(f"--output {output}: {error.strerror}; expected the folder of the study") from None
    if not nearest.is_dir():
        raise InputError(f"--output {output}: {nearest} is a file; expected the folder of the study")
    return study


def select_stages(stages: Mapping[str, StageRunner], only: Sequence[str]) -> list[StageRunner]:
    """Return the stages that `only` names, and what they need; all if it is empty. Raises InputError for an unknown name."""
    wanted: list[str] = [] if only else list(stages)
    names = {id: id.rpartition("/")[2] for id in stages}
    for pattern in only:
        found = [id for id, name in names.items() if any(fnmatch.fnmatchcase(text, pattern) for text in (id, name))]
        if not found:
            near = closest_match(pattern, [*names.values(), *names])
            raise InputError(f"--only: found {pattern}, {f'did you mean {near}?' if near else 'expected a name of the plan'}")
        wanted += found
    return with_dependencies(stages, wanted)


def device_slots(jobs: int) -> list[str]:
    """Return a slot for each of `jobs` processes: the device that it sees, "" without any; 0: as many as devices or cores."""
    devices = select_visible_devices(len(accelerator_names()))[1]
    count = jobs or len(devices) or usable_core_count()
    return [devices[number % len(devices)] if devices else "" for number in range(count)]
