"""Functions of the commands, for Python programs and notebooks.

`megaenc` offers them by name. Each takes the fields of a command's configuration as keywords, which
are the flags with underscores (docs/flags.md), and returns a result. It can be called repeatedly in
one process, and restores torch's random state and threads.

Under torchrun all processes call each function, and all get its result: `pretrain` and
`train_embedder` train in all of them, the others work in the first one while the others wait.
"""

import functools
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from megaenc import flags
from megaenc.console import silenced_libraries
from megaenc.convert.command import ExportedModel, ToHFConfig, export_run
from megaenc.data.preprocess import command as preprocess_command
from megaenc.data.preprocess.config import PreprocessConfig
from megaenc.data.tokenizer.train_command import TrainTokenizerConfig, train_and_save_tokenizer
from megaenc.dist_env import LAUNCHER_VARIABLES, get_world_size
from megaenc.embed.command import EmbedEvalConfig, run_evaluation
from megaenc.embed.config import EmbedTrainConfig, TrainedEmbedder
from megaenc.embed.evaluation_file import EvaluationRow
from megaenc.embed.train_command import train_embedding_model
from megaenc.errors import InputError
from megaenc.finetune.command import FinetuneRunConfig, run_finetuning
from megaenc.finetune.results.files import Result
from megaenc.training.callbacks import Callback
from megaenc.training.command import parent_config, run_plan
from megaenc.training.config import PretrainConfig, merge_given
from megaenc.training.run_dir import PretrainResult

if TYPE_CHECKING:
    from megaenc.training.trainer import Trainer

P = ParamSpec("P")
Returned = TypeVar("Returned")
_MAX_WAIT = timedelta(days=30)
_POLL_SECONDS = 0.05


def _restore_process_state(function: Callable[P, Returned]) -> Callable[P, Returned]:
    """Wrap a function so that libraries are silent in it, and torch's state lasts."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Returned:
        with silenced_libraries():
            from megaenc.backend.initialize import restore_torch_state

            with restore_torch_state():
                try:
                    return function(*args, **kwargs)
                finally:
                    gc.collect()  # frees models, which callbacks refer to and which refer to them

    return call


@_restore_process_state
def train_tokenizer(settings: TrainTokenizerConfig | None = None, **fields: Any) -> Path:
    """Train a byte-level BPE tokenizer as `megaenc tokenizer`; return its directory.

    `train_tokenizer(input="corpus.jsonl", vocab_size=8192, output="tokenizer")`

    Args:
        settings: Values of fields that are not given; None: the defaults.
        fields: Flags of the command by name; `input` and `output` must be given.

    Raises:
        InputError: A field, the input or the output is wrong; the message is one line.
    """
    settings = flags.build_from_keywords(
        TrainTokenizerConfig, settings, fields, caller="train_tokenizer"
    )
    _call_on_rank_0(lambda: train_and_save_tokenizer(settings))
    return Path(settings.output)


@_restore_process_state
def preprocess(settings: PreprocessConfig | None = None, **fields: Any) -> list[Path]:
    """Tokenize text as `megaenc preprocess`; return the prefix of each corpus.

    `[prefix] = preprocess(input="corpus.jsonl", output_prefix="out/corpus",
    tokenizer="tokenizer", append_eod=True)`

    Args:
        settings: Values of fields that are not given; None: the defaults.
        fields: Flags of the command by name; `input` or another source, `output_prefix` and
            `tokenizer` must be given.

    Returns:
        One prefix for each of `json_keys`, for `data_path` of `pretrain`.

    Raises:
        InputError: A field, the input or the output is wrong; the message is one line.
    """
    settings = flags.build_from_keywords(PreprocessConfig, settings, fields, caller="preprocess")
    return _call_on_rank_0(lambda: preprocess_command.preprocess(settings))


@_restore_process_state
def pretrain(
    settings: PretrainConfig | None = None,
    *,
    callbacks: Sequence["Mapping[str, Any] | Callable[[Trainer], Callback]"] = (),
    **fields: Any,
) -> PretrainResult:
    """Pretrain an encoder as `megaenc pretrain`, or resume the run in `save`.

    `pretrain(data_path=prefix, tokenizer="tokenizer", train_iters=100, save="run").loss`

    Args:
        settings: Values of fields that are not given, of which `shape` decides the model's shape;
            None: the defaults.
        callbacks: Subclasses of Callback; functions of the trainer that return one, such as
            `functools.partial(StopAtLoss, loss=3)`; or mappings as in --callbacks.
        fields: Flags of the command by name. Without `data_path` and `tokenizer` it trains on the
            demo; without `save` nothing is kept.

    Raises:
        InputError: A field, data, a checkpoint or the directory is wrong; one line.
        KeyboardInterrupt: SIGINT, as by a notebook's stop button; a checkpoint is in `save` then.
    """
    for callback in callbacks:
        if not callable(callback) and not isinstance(callback, Mapping):
            raise InputError(
                f"pretrain(): callbacks: found a {type(callback).__name__}, expected a subclass of "
                "Callback, or a function that builds one of the trainer"
            )
    if mappings := [callback for callback in callbacks if isinstance(callback, Mapping)]:
        fields["callbacks"] = mappings
    given = fields.keys() if settings is None else None
    settings = flags.build_from_keywords(
        PretrainConfig,
        settings,
        fields,
        caller="pretrain",
        merge=functools.partial(merge_given, source="pretrain()"),
    )
    is_main_thread = threading.current_thread() is threading.main_thread()
    if settings.output.save and not is_main_thread:
        raise InputError(
            "pretrain(): field `save`: found a thread other than the main one, which alone gets "
            "the signals that stop a run; call it in the main thread, or without `save`"
        )
    if settings.output.dry_run:
        raise InputError(
            "pretrain(): field `dry_run`: found True, expected False; `megaenc pretrain --dry-run` "
            "prints the plan"
        )
    if given is not None:
        given = flags.find_given_fields(
            given, settings.config, preset="model", without=parent_config(settings)
        )
    from megaenc.training.planning import build_plan

    builders = [callback for callback in callbacks if not isinstance(callback, Mapping)]
    return run_plan(build_plan(settings, given), builders, ends_process=False)


@_restore_process_state
def export(settings: ToHFConfig | None = None, **fields: Any) -> list[ExportedModel]:
    """Export a run to Hugging Face as `megaenc convert to-hf`; return the models.

    `[model] = export(load="run", output="hf")`

    Args:
        settings: Values of fields that are not given; None: the defaults.
        fields: Flags of the command by name, with `architecture` for --as; `load`, a run directory,
            and `output`, a new directory, must be given.

    Returns:
        One model; with `all` one for each checkpoint.

    Raises:
        InputError: A field, the run or the output is wrong, or the export differs; one line.
    """
    settings = flags.build_from_keywords(
        ToHFConfig, settings, fields, caller="export", required=("load", "output")
    )
    return _call_on_rank_0(lambda: export_run(settings))


@_restore_process_state
def finetune_model(settings: FinetuneRunConfig | None = None, **fields: Any) -> Result:
    """Fine-tune and evaluate a model as `megaenc finetune run`; return its scores.

    `finetune_model(model="hf", dataset="sst2", output="results").test.score`

    Args:
        settings: Values of fields that are not given; None: the defaults.
        fields: Flags of the command by name; `model`, a directory, and `dataset`, a name or a
            path, must be given.

    Returns:
        Scores as fractions. If a loss or prediction was NaN or inf, `failure` is the reason, and
        there are no scores. A run that is finished in `output` is read and not repeated.

    Raises:
        InputError: A field, the model or the data set is wrong; the message is one line.
    """
    settings = flags.build_from_keywords(
        FinetuneRunConfig,
        settings,
        fields,
        caller="finetune_model",
        required=("model", "dataset"),
    )
    result, _ = _call_on_rank_0(lambda: run_finetuning(settings))
    return result


@_restore_process_state
def train_embedder(settings: EmbedTrainConfig | None = None, **fields: Any) -> TrainedEmbedder:
    """Train an embedding model on pairs as `megaenc embed train`, or resume it.

    `train_embedder(model="hf", data="pairs.jsonl", output="embedder")`

    Args:
        settings: Values of fields that are not given; None: the defaults.
        fields: Flags of the command by name; `model`, a directory, `data`, files or directories of
            pairs, and `output`, a new directory, must be given. The same call again resumes from
            OUTPUT.state, or returns the result of a finished training.

    Raises:
        InputError: A field, the model or the data is wrong; the message is one line.
        ArithmeticError: The loss or gradient norm is NaN or inf.
    """
    settings = flags.build_from_keywords(
        EmbedTrainConfig,
        settings,
        fields,
        caller="train_embedder",
        required=("model", "data", "output"),
    )
    return train_embedding_model(settings)


@_restore_process_state
def evaluate_embeddings(
    settings: EmbedEvalConfig | None = None, **fields: Any
) -> list[EvaluationRow]:
    """Evaluate embeddings as `megaenc embed eval`; return a row for each score.

    `evaluate_embeddings(model="embedder", data="scifact")[-1].mean`

    Args:
        settings: Values of fields that are not given; None: the defaults.
        fields: Flags of the command by name; `data`, directories of BEIR or of labelled texts, or
            `tasks` of mteb must be given.

    Returns:
        Scores in percent by data set; in each, those of the baselines `random` and `BM25`, then of
        the models.

    Raises:
        InputError: A field, a model or a data set is wrong; the message is one line.
    """
    settings = flags.build_from_keywords(
        EmbedEvalConfig, settings, fields, caller="evaluate_embeddings"
    )
    return _call_on_rank_0(lambda: run_evaluation(settings))


def _call_on_rank_0(function: Callable[[], Returned]) -> Returned:
    """Call `function` on rank 0 only, and return its result on all ranks.

    All ranks call this together, and raise its InputError. It runs as in a process without a
    launcher, and its result must be picklable. The others wait for a key of torchrun's store, so
    that no collective can time out.
    """
    ranks = get_world_size()
    if ranks == 1:
        return function()
    from megaenc.backend.initialize import check_launcher_variables, rendezvous

    check_launcher_variables()
    store, rank, _ = rendezvous(_MAX_WAIT)
    result = error = None
    if rank:
        result, error = pickle.loads(store.get("result"))
        store.add("received", 1)
    else:
        hidden = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
        try:
            result = function()
        except InputError as raised:
            error = InputError(str(raised))  # subclasses may not be picklable
        finally:
            os.environ.update(hidden)
        store.set("result", pickle.dumps((result, error)))
        while store.add("received", 0) < ranks - 1:  # rank 0 may hold the store
            time.sleep(_POLL_SECONDS)
    if error is not None:
        raise error
    return result
