"""`megaenc finetune run`: one model on one data set, with one learning rate and one seed."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaenc import flags
from megaenc.atomic_io import exit_on_sigterm
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.config import FinetuneConfig, check_minimums
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.examples import DataUnavailable, TaskFamily
from megaenc.finetune.grid.jobs import TOKENIZED_CACHE, build_jobs, check_learning_rate, select_remaining_work, try_lock_run
from megaenc.finetune.grid.progress import estimate_completion
from megaenc.finetune.results import files as result_files
from megaenc.output_paths import check_parent_writable, remove_new_parents_on_error
from megaenc.processes import check_process_count

_BASELINE_DESCRIPTIONS = {
    TaskFamily.SC: "majority class",
    TaskFamily.TC: "most frequent tag of each word",
    TaskFamily.QA: "never answering",
    TaskFamily.IR: "random ranking",
}
"""What `Scores.baseline` of each family is of."""


@dataclass(frozen=True)
class FinetuneRunConfig:
    """What `megaenc finetune run` takes."""

    config: str = ""
    """YAML file of flags; the command line wins over it"""
    model: str = ""
    """Hugging Face folder of an encoder or a decoder; NAME=FOLDER names the results otherwise than the folder's last part"""
    dataset: str = ""
    """sst2 and the study's others by name, demo_sc, demo_tc, demo_qa, demo_ir, a path to your own, or NAME=PATH"""
    learning_rate: float = 1e-4
    """peak of the rate"""
    seed: int = 0
    """order of the data and the new head follow from it"""
    output: str = "results"
    """folder of results; what is finished there is not done again"""
    retry_failed: bool = False
    """try a run again that is written down as failed, as its loss became NaN"""
    data: DatasetConfig = field(default_factory=DatasetConfig)
    protocol: FinetuneConfig = field(default_factory=FinetuneConfig)


@handle_command_errors
def run_main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc finetune run`; ends with exit code 1 if the run failed."""
    silence_libraries()
    settings = flags.parse_with_config(FinetuneRunConfig, argv, prog="megaenc finetune run", description=__doc__)
    for name in ("model", "dataset"):
        if not getattr(settings, name):
            raise InputError(f"--{name}: missing; see megaenc finetune run --help")
    settings.protocol.check()
    check_process_count("--threads", settings.protocol.threads)
    check_learning_rate("--learning-rate", settings.learning_rate)
    check_minimums(settings, seed=0)
    if settings.seed >= 2**63:
        raise InputError(f"--seed: found {settings.seed}, expected less than 2**63")
    output = Path(settings.output)
    check_parent_writable(output / "model", "--output")
    from megaenc.finetune.datasets.registry import find_dataset

    one = ((settings.model,), (settings.dataset,), (settings.learning_rate,), (settings.seed,))
    [job] = build_jobs(*one, settings.output, settings.protocol, settings.data, find_dataset)
    folder = result_files.job_folder(job, job.evaluate_on[0].name)
    todo, _ = select_remaining_work(job, retry_failed=settings.retry_failed)
    if todo is not None:
        with exit_on_sigterm(), _clean_up_on_input_error(output, todo.model.name), try_lock_run(todo) as mine:
            if not mine:
                raise InputError(f"{folder}: another process is at this run; wait for it")
            result_files.remove_partial_files(todo)
            print_rank_0(f"{todo.name}: imports torch and transformers")
            from megaenc.finetune.train import train_and_evaluate

            with ProgressLine("loading", total=1.0) as line:
                try:
                    train_and_evaluate(
                        todo,
                        lambda progress: line.update(
                            estimate_completion(progress), description=progress.stage, **progress.fields
                        ),
                    )
                except DataUnavailable as error:  # a grid tries such a run again
                    raise InputError(str(error)) from None
    _print_scores(folder, job.family, before=todo is None)


@contextlib.contextmanager
def _clean_up_on_input_error(output: Path, model: str) -> Iterator[None]:
    """If the block raises InputError, remove tokenised data that were added to `output`, and new folders that are empty.

    Results that other processes write to `output` meanwhile stay; tokenised data that they need they make again.
    """
    cache = output / TOKENIZED_CACHE
    before = {*cache.glob("*.npz")}
    with remove_new_parents_on_error(cache / "data", output / model / ".locks" / "run"):
        try:
            yield
        except InputError:
            for path in {*cache.glob("*.npz")} - before:
                path.unlink(missing_ok=True)
            raise


def _print_scores(folder: Path, family: TaskFamily, *, before: bool) -> None:
    """Print the scores next to the trivial ones, or why there are none."""
    found = result_files.read_result(folder)
    if found.failure is not None:
        print_rank_0(
            f"failed{' before' * before}: {found.failure} ({folder / result_files.FAILED}); choose a smaller --learning-rate"
        )
        sys.exit(1)
    for name, split in (("validation", found.validation), ("test", found.test)):
        values = {"score": split.score, **split.metrics}
        listed = ", ".join(f"{metric} {100 * value:.2f} ({100 * split.baseline[metric]:.2f})" for metric, value in values.items())
        print_rank_0(f"{name}: {listed}" + (f"; worthless: {split.collapsed}" if split.collapsed else ""))
    print_rank_0(f"in brackets: {_BASELINE_DESCRIPTIONS[family]}; {'finished before, ' * before}{folder / result_files.RESULTS}")
