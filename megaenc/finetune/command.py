"""Fine-tune and evaluate one model on one data set (`megaenc finetune run`).

A run has one learning rate and one seed.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megaenc import flags
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.examples import DataUnavailable, TaskFamily
from megaenc.finetune.grid.jobs import build_jobs, select_remaining_work, try_lock_run
from megaenc.finetune.grid.progress import estimate_completion
from megaenc.finetune.job import TOKENIZED_CACHE, RunProgress
from megaenc.finetune.model.fingerprint import save_fingerprints
from megaenc.finetune.results import files as result_files
from megaenc.flags import PositiveFloat, Seed
from megaenc.machine import check_process_count
from megaenc.output_paths import (
    check_parent_writable,
    refuse_existing,
    remove_new_parents_on_error,
    report_stale_files,
)
from megaenc.processes import exit_on_sigterm

_BASELINE_DESCRIPTIONS = {
    TaskFamily.SC: "majority class",
    TaskFamily.TC: "most frequent tag of each word",
    TaskFamily.QA: "never answering",
    TaskFamily.IR: "random ranking",
    TaskFamily.REGRESSION: "one number for all texts",
    TaskFamily.MULTI_LABEL: "the most frequent label for all texts",
    TaskFamily.RERANKING: "random ranking",
}
"""The trivial predictor behind `Scores.baseline` of each family."""


@dataclass(frozen=True)
class FinetuneRunConfig:
    """Options of `megaenc finetune run`: model, data set, hyperparameters, output.

    Each field, and each of `data` (DatasetConfig) and `protocol` (FinetuneConfig), is a flag, read
    by `flags.parse_with_config`. `model` and `dataset` must not stay empty, which the constructor
    does not check. `config` is a YAML file of flags, `learning_rate` the peak, `seed`
    that of order, head and dropout. `output` is the directory of results, `save_model` one for the
    model, "" to keep none, and `retry_failed` repeats a run that failed.
    """

    config: str = ""
    """YAML file of flags; flags on the command line override it"""
    model: str = ""
    """Hugging Face directory of an encoder or a decoder; its last part names the results,
    NAME=DIRECTORY gives another name"""
    dataset: str = ""
    """name of a data set of the study (sst2, squad, ...), demo_sc, demo_tc, demo_qa, demo_ir, a
    path to your own, NAME=PATH, or a repository of the Hub: ORG/NAME, ORG/NAME:CONFIG or hf:NAME,
    each with @REVISION"""
    learning_rate: PositiveFloat = 1e-4
    """peak learning rate, reached at the end of the warmup"""
    seed: Seed = 0
    """seed of the data order, the head's initial weights and dropout"""
    output: str = "results"
    """directory of results; a run that is finished there is not repeated"""
    save_model: str = ""
    """new directory for the trained model, in Hugging Face's format, in float32; a finished run is
    repeated for it"""
    retry_failed: bool = False
    """repeat a run that failed with a NaN loss and left failed.json"""
    data: DatasetConfig = field(default_factory=DatasetConfig)
    """how local data is read"""
    protocol: FinetuneConfig = field(default_factory=FinetuneConfig)
    """fine-tuning protocol, the same for all runs of a comparison"""


@handle_command_errors
def run_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc finetune run`: train and evaluate a model, and print its scores.

    Existing results of this run in the output directory are printed without training, except with
    --save-model, whose directory for the model must not exist yet. The process exits with 1 if the
    run failed (NaN or inf), now or earlier; only --retry-failed repeats a failed run. It exits with
    2 at wrong input, such as results of other settings in the output directory.

    Args:
        argv: Arguments after `megaenc finetune run`; None: `sys.argv[1:]`.
    """
    silence_libraries()
    settings = flags.parse_with_config(
        FinetuneRunConfig, argv, prog="megaenc finetune run", description=__doc__
    )
    flags.check_given(settings, "finetune run", "model", "dataset")
    with exit_on_sigterm():
        result, is_new = run_finetuning(settings)
    _print_scores(result, was_finished=not is_new)


def run_finetuning(settings: FinetuneRunConfig) -> tuple[result_files.Result, bool]:
    """Train and evaluate a model, or read the results of the same run.

    Returns:
        The result, which has `failure` if a loss or a prediction was NaN or inf; and whether it was
        computed now.

    Raises:
        InputError: Settings, model, data or output are unusable, or another process computes it.
    """
    settings.protocol.check()
    check_process_count("--threads", settings.protocol.threads)
    output = Path(settings.output)
    check_parent_writable(output / "model", "--output")
    if settings.save_model:
        refuse_existing(Path(settings.save_model), "--save-model")
        report_stale_files(Path(settings.save_model))
        check_parent_writable(Path(settings.save_model), "--save-model")
    from megaenc.finetune.datasets.registry import find_dataset

    grid = ((settings.model,), (settings.dataset,), (settings.learning_rate,), (settings.seed,))
    [job] = build_jobs(*grid, settings.output, settings.protocol, settings.data, find_dataset)
    job = replace(job, save_model=settings.save_model)
    directory = result_files.job_directory(job, job.evaluate_on[0].name)
    pending, failed = select_remaining_work(job, retry_failed=settings.retry_failed)
    if settings.save_model and failed is None:
        pending = job
    if pending is not None:
        with (
            _clean_up_on_input_error(output, pending.model.name),
            try_lock_run(pending) as is_locked,
        ):
            if not is_locked:
                raise InputError(
                    f"{directory}: another process computes this run; "
                    "wait for it or choose another --output"
                )
            result_files.remove_partial_files(pending)
            print_rank_0(f"{pending.name}: importing torch and transformers")
            from megaenc.finetune.train import train_and_evaluate

            with ProgressLine("loading", total=1.0, closing=False) as line:

                def report(progress: RunProgress) -> None:
                    line.update(
                        estimate_completion(progress), description=progress.stage, **progress.fields
                    )

                try:
                    train_and_evaluate(pending, report)
                except DataUnavailable as error:  # only a grid retries it
                    raise InputError(str(error)) from None
            save_fingerprints(settings.output)
    return result_files.read_result(directory), pending is not None


@contextlib.contextmanager
def _clean_up_on_input_error(output: Path, model: str) -> Iterator[None]:
    """Delete new cache files and empty new directories of `output` at an InputError.

    Concurrent processes recompute cache files that they miss.
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


def _print_scores(result: result_files.Result, *, was_finished: bool) -> None:
    """Print the scores of a run with their baselines.

    The exit code is 1 if the run failed.
    """
    directory = result.path
    if result.failure is not None:
        again = " before" * was_finished
        print_rank_0(
            f"failed{again}: {result.failure} ({directory / result_files.FAILED}); "
            "choose a smaller --learning-rate"
        )
        sys.exit(1)
    if result.evaluations:
        scores_text = ", ".join(f"{step:,} {100 * score:.2f}" for step, score in result.evaluations)
        print_rank_0(f"validation score by step: {scores_text}; best: step {result.best_step:,}")
    if result.threshold is not None:
        print_rank_0(f"labels are predicted from probability {result.threshold:.4f}")
    for name, split in (("validation", result.validation), ("test", result.test)):
        values = {"score": split.score, **split.metrics}
        texts = []
        for metric, value in values.items():
            texts.append(f"{metric} {100 * value:.2f} ({100 * split.baseline[metric]:.2f})")
        values_text = ", ".join(texts)
        print_rank_0(
            f"{name}: {values_text}"
            + (f"; worthless: {split.collapsed}" if split.collapsed else "")
        )
    print_rank_0(
        f"in brackets: {_BASELINE_DESCRIPTIONS[TaskFamily(result.family)]}; "
        f"{'finished before, ' * was_finished}{directory / result_files.RESULTS}"
    )
