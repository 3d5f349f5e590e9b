"""Fine-tuned models in Hugging Face's format: weights, tokenizer, model card.

A directory is verified before it gets its name.
"""

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaenc import __version__
from megaenc.atomic_io import atomic_dir, remove_path, wait_for_lock
from megaenc.console import print_rank_0
from megaenc.convert.sentence_transformers import write_json, write_sentence_layout
from megaenc.convert.tokenizer_io import drop_incompatible_mask_role, write_tokenizer
from megaenc.data.tokenizer.fast_encode import PROBES
from megaenc.data.tokenizer.special_tokens import set_special_tokens, set_template
from megaenc.data.tokenizer.tokenizer import load_tokenizer
from megaenc.errors import InputError
from megaenc.finetune.examples import DOCUMENT, POOLED_FAMILIES, QUERY, Question, TaskFamily
from megaenc.finetune.job import FinetuneJob
from megaenc.finetune.model.backbone import Backbone, PackedTexts, pack_texts
from megaenc.finetune.model.load import load_backbone, load_with_native_head
from megaenc.finetune.model.task_class import (
    USE_NATIVE,
    NativeHead,
    build_hf_model,
    check_same_outputs,
    find_task_class,
)
from megaenc.finetune.model_card import build_finetuned_card
from megaenc.finetune.results import files as result_files
from megaenc.finetune.results.files import DatasetResult, SplitScores
from megaenc.finetune.tasks import FinetuneTask, TaskModel
from megaenc.finetune.tokenized import (
    TextEncoder,
    TokenizedSplit,
    TokenizedTexts,
    choose_special_tokens,
)
from megaenc.hf.model import find_lowest_version, save_hf_config, save_hf_model
from megaenc.output_paths import create_parent_with_rollback

_MAX_CHECKED_TOKENS = 2048


def padding_id(tokenizer: Any) -> int | None:
    """Return the id of a tokenizer's padding token, else of its EOS token, else None.

    Args:
        tokenizer: Tokenizer of transformers.
    """
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def write_trained_tokenizer(
    tokenizer: Any, directory: Path, max_length: int, model_type: str, **options: Any
) -> None:
    """Write a tokenizer that pads and cuts texts as a training did, on the right.

    Args:
        tokenizer: Tokenizer of transformers. It is changed: maximum length, sides and, if it has
            none, its padding token (EOS, or without one SEP, or without either none).
        directory: Existing directory, which gets tokenizer.json and tokenizer_config.json.
        max_length: Maximum tokens of a text, special tokens included.
        model_type: Value of `model_type` in the config.json of `directory`. With "qwen2" a mask
            token that transformers would change loses its role.
        options: Further fields of tokenizer_config.json.
    """
    tokenizer.model_max_length = max_length
    tokenizer.padding_side = "right"
    tokenizer.truncation_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.sep_token
    drop_incompatible_mask_role(model_type, tokenizer)
    write_tokenizer(tokenizer, directory, **options)


def load_model(
    job: FinetuneJob,
    task: FinetuneTask,
    tokenizer: Any,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> tuple[Backbone, NativeHead | None]:
    """Return a job's backbone in `dtype`, and its head if it is transformers' own.

    The backbone is that of `load_backbone`, in eval mode. The head is a new float32 NativeHead with
    --head native, drawn from torch's generator, else None: `FinetuneTask.build_head` builds a
    linear one. If the trained model may be written, and always with a native head, transformers'
    task class is built too and must compute the same outputs.

    Args:
        tokenizer: Tokenizer of the model.

    Raises:
        InputError: The model cannot be loaded, or transformers' task class computes other outputs.
    """
    padding = padding_id(tokenizer)
    directory = job.model.location
    attention = job.protocol.attention
    after = choose_special_tokens(tokenizer, job.protocol).after

    def check(backbone: Backbone, head: torch.nn.Module, texts: PackedTexts) -> None:
        model = TaskModel(backbone, head).eval()
        hf_model = build_hf_model(
            backbone, head, task.family, task.label_names, padding, job.protocol.pooling
        )
        if after:  # some classes treat an EOS that is also padding in another way
            tokens = texts.tokens.clone()
            tokens[texts.cu_seqlens[1:].long() - 1] = after[-1]
            texts = dataclasses.replace(texts, tokens=tokens)
        check_same_model(hf_model, task, model, texts)

    def check_linear(backbone: Backbone, texts: PackedTexts) -> None:
        if job.keeps_model:
            check(backbone, task.build_head(backbone.hidden_size).to(device), texts)

    if job.protocol.head == "linear":
        return load_backbone(
            directory, attention, device=device, dtype=dtype, check=check_linear
        ), None
    return load_with_native_head(
        directory,
        attention,
        task.family,
        task.label_names,
        padding=padding,
        device=device,
        dtype=dtype,
        check=check,
    )


@torch.no_grad()
def check_same_model(
    hf_model: Any, task: FinetuneTask, model: TaskModel, texts: PackedTexts
) -> None:
    """Check that a transformers model has the outputs of `model` on `texts`.

    Outputs are token states in retrieval, else logits; they may differ by float32 rounding. Both
    models must be float32 and in eval mode.

    Args:
        hf_model: Model of the family's task class. It is moved to the device of `model`.

    Raises:
        InputError: Outputs differ.
    """

    def compute() -> torch.Tensor:
        return (
            model.backbone.compute_states(texts)
            if task.family == TaskFamily.IR
            else task.compute_outputs(model, texts)
        )

    if isinstance(model.head, NativeHead):
        flag = "--head native"
        advice = "expected --head linear"
    else:
        flag = "--save-model"
        advice = "expected another model" if task.family == TaskFamily.IR else USE_NATIVE
    check_same_outputs(hf_model.to(model.device), texts, compute, flag, advice)


@dataclass(frozen=True)
class ModelKeeper:
    """Writer of a task's fine-tuned model that verifies the model in transformers.

    It is for a `job` whose `keeps_model` is True, and its `task`. Call `check_tokenizer` before
    training, and `keep` after the evaluation: it writes the model to `job.save_model`, if given,
    and into the run's results, which it writes too; with `job.keep` "best" into them only if its
    validation score is the best so far, in place of other runs' models. A written directory has
    weights, config, tokenizer, finetuning.json and README.md. `encoder` tokenizes as in training.
    """

    job: FinetuneJob
    task: FinetuneTask
    encoder: TextEncoder

    def check_tokenizer(self, config: Any) -> None:
        """Check that the tokenizer, written and reloaded, encodes texts as the run does.

        The texts are fixed; the files are temporary.

        Args:
            config: The model's config of transformers, which may determine the tokenizer's class.

        Raises:
            InputError: The tokenizer, as transformers loads it, gives other tokens.
        """
        with tempfile.TemporaryDirectory() as name:
            save_hf_config(config, Path(name))
            self._write_tokenizer(Path(name), config.model_type)

    def keep(
        self,
        model: TaskModel,
        data: TokenizedSplit,
        evaluate: Callable[[], Mapping[str, SplitScores]],
        results: Sequence[DatasetResult],
    ) -> None:
        """Write the float32 `model` if the job keeps it, then the run's results.

        `job.save_model`, if given, always gets the model. The results get it with `job.keep` "all";
        with "best" only if its validation score is the best of all results so far of this model and
        training set (of equal ones, the lower rate, then the lower seed is best), and models kept
        by the other runs are removed. Such runs of a data set wait for each other. Other outputs of
        transformers are an InputError, and no results are written.

        Args:
            data: Test split, to compare outputs on.
            evaluate: Function that scores `model` by split in eval mode, called if it is written.
            results: Results on all data sets. The first gives the score and the model's directory.
        """
        job = self.job
        result = results[0]
        data = data["queries"] if isinstance(data, dict) else data
        place = result_files.job_directory(job, result.dataset)
        targets = [Path(job.save_model)] if job.save_model else []
        with contextlib.ExitStack() as stack:
            rivals: list[Path] = []
            if job.keep != "none":
                stack.enter_context(wait_for_lock(place.parent / f".{job.train_on}.keep.lock"))
                is_best = True
                if job.keep == "best":
                    is_best, rivals = self._compare_with_others(
                        place, result.scores["validation"].score
                    )
                if is_best:
                    targets.append(place / result_files.KEPT_MODEL)
            scores = evaluate() if targets else {}
            for target in targets:
                if target == place / result_files.KEPT_MODEL:
                    remove_path(target)
                self.write(target, model, data, scores, result)
                rounded = "" if self.task.protocol.precision == "fp32" else " in float32"
                print_rank_0(
                    f"{job.name}: kept in {target}: test score "
                    f"{100 * scores['test'].score:.2f}{rounded}"
                )
            # The results come last: they mark the run as finished.
            for dataset_result in results:
                result_files.write_result(job, dataset_result)
            for rival in rivals:
                remove_path(rival / result_files.KEPT_MODEL)

    def _compare_with_others(self, place: Path, validation: float) -> tuple[bool, list[Path]]:
        """Return whether the run at `place` has its data set's best validation score.

        Of equal runs the one with the smaller rate, then the smaller seed is best.

        Returns:
            Whether the run is best, and if so the directories of the other runs.
        """
        sort_key = (-validation, self.job.learning_rate, self.job.seed)
        results = [
            result_files.read_result(path)
            for path in place.parent.iterdir()
            if path != place and path.is_dir()
        ]
        results = [
            result
            for result in results
            if result is not None and result.train_on == self.job.train_on and result.validation
        ]
        is_best = all(
            sort_key <= (-result.validation.score, result.learning_rate, result.seed)
            for result in results
        )
        return is_best, [result.path for result in results] if is_best else []

    def write(
        self,
        target: Path,
        model: TaskModel,
        data: TokenizedTexts,
        scores: Mapping[str, SplitScores],
        result: DatasetResult,
    ) -> None:
        """Write the float32 `model` to the new directory `target`, and verify it.

        `model` must be in eval mode, in which outputs are compared. `target` must be absent or an
        empty directory; its parents are created.

        Args:
            data: Texts, at least one; outputs on the shortest and on the longest are compared.
            scores: Scores of this model by split, written to finetuning.json and README.md.
            result: Result of the run.

        Raises:
            InputError: transformers computes other outputs, or `target` has files; nothing is left.
        """
        with create_parent_with_rollback(target, "--save-model"), atomic_dir(target) as directory:
            padding = padding_id(self.encoder.tokenizer)
            pooling = self.task.protocol.pooling
            hf_model = build_hf_model(
                model.backbone,
                model.head,
                self.task.family,
                self.task.label_names,
                padding,
                pooling,
            )
            save_hf_model(hf_model, directory)
            config = hf_model.config
            del hf_model
            self._write_tokenizer(directory, config.model_type)
            if self.task.family == TaskFamily.IR:
                prompts = {"query": QUERY, "document": DOCUMENT}
                write_sentence_layout(
                    directory,
                    model.backbone.hidden_size,
                    self.encoder.max_length,
                    prompts,
                    pooling=pooling,
                )
            details = self._describe(scores, result)
            write_json(directory / result_files.MODEL_DETAILS, details)
            needs_spaces = self.task.family == TaskFamily.TC and needs_spaced_words(
                load_tokenizer(directory)
            )
            architecture = config.architectures[0]
            version = find_lowest_version(config)
            card = build_finetuned_card(
                target.resolve().name, details, architecture, version, needs_spaces=needs_spaces
            )
            (directory / "README.md").write_text(card, encoding="utf-8")
            loaded = find_task_class(config, self.task.family).from_pretrained(
                directory, local_files_only=True
            )
            # The shortest texts, at most about 2,048 tokens, and the longest.
            order = np.argsort(data.lengths, kind="stable")
            fitting = int((np.cumsum(data.lengths[order]) <= _MAX_CHECKED_TOKENS).sum())
            rows = [*order[: min(fitting, len(order) - 1)], order[-1]]
            texts = pack_texts(data.gather_rows(np.array(rows)), model.device)
            check_same_model(loaded.eval(), self.task, model, texts)

    def _write_tokenizer(self, directory: Path, model_type: str) -> None:
        """Write the tokenizer so that transformers adds and cuts tokens as the run does.

        Raises:
            InputError: transformers gives other tokens.
        """
        special = self.encoder.special_tokens
        if self.task.family == TaskFamily.QA:  # a question and its context are one text
            tokenizer = set_template(self.encoder.tokenizer, special, between=())
        else:
            tokenizer = copy.deepcopy(set_special_tokens(self.encoder.tokenizer, special))
        options = {
            "split_special_tokens": True,
            "model_input_names": ["input_ids", "attention_mask"],
        }
        write_trained_tokenizer(
            tokenizer, directory, self.encoder.max_length, model_type, **options
        )
        self._check_written_tokenizer(load_tokenizer(directory))

    def _check_written_tokenizer(self, loaded: Any) -> None:
        """Check that the `loaded` tokenizer encodes fixed texts as the run does.

        One of the texts is longer than the maximum.

        Raises:
            InputError: The tokens of a text differ.
        """
        texts = [
            text
            for text in (*PROBES, " ".join(PROBES), "word " * self.encoder.max_length)
            if text.strip()
        ]
        encoded = self.encoder.encode(texts)
        rows = encoded.gather_rows(list(range(len(texts))))
        actual = [loaded(text, truncation=True)["input_ids"] for text in texts]
        if (
            self.task.family in POOLED_FAMILIES
            and self.encoder.special_tokens.count
            and self.encoder.has_room_for_pairs
        ):
            pairs = list(zip(texts, reversed(texts), strict=True))
            rows += self.encoder.encode(pairs).gather_rows(list(range(len(pairs))))
            actual += [loaded(*pair, truncation=True)["input_ids"] for pair in pairs]
        if self.task.family == TaskFamily.QA:
            questions = [Question("", "who?", text, ()) for text in texts]
            data = self.task.encode(questions, self.encoder)
            rows += data.gather_rows(list(range(len(texts))))
            actual += [
                loaded("Question: who?\nContext: ", text, truncation="only_second")["input_ids"]
                for text in texts
            ]
        for text, ids, row in zip(texts * 2, actual, rows, strict=False):
            if list(ids) != row.tolist():
                raise InputError(
                    f"--save-model: transformers' {type(loaded).__name__} encodes "
                    f"{text[:40]!r} as {list(ids)[:8]}, "
                    f"the run as {row.tolist()[:8]}; expected another model"
                )

    def _describe(self, scores: Mapping[str, SplitScores], result: DatasetResult) -> dict[str, Any]:
        """Return the content of finetuning.json."""
        job = self.job
        details = {"megaenc": __version__} | result_files.describe_job(job, result.dataset)
        details |= {"steps": result.steps, "trained": result.trained}
        if result.protocol.uses_best_weights:
            details["best_step"] = result.best_step
        if result.threshold is not None:
            details["threshold"] = result.threshold
        if self.task.dataset.pair_template:
            details["pair_template"] = self.task.dataset.pair_template
        return details | {
            "protocol": vars(result.protocol),
            "fingerprints": job.fingerprints.for_dataset(result.dataset),
            "scores": {
                split: {"score": part.score, **part.metrics} for split, part in scores.items()
            },
        }


def needs_spaced_words(tokenizer: Any) -> bool:
    """Return whether `is_split_into_words` needs words with a space before them.

    The space is before each word but the first. It is needed (by byte-level BPE, not by
    SentencePiece or WordPiece) if only then the tokens are those of the words joined by spaces.

    Args:
        tokenizer: Tokenizer of transformers.
    """
    words = PROBES[0].split()
    spaced = [words[0], *(f" {word}" for word in words[1:])]
    joined = tokenizer(" ".join(words))["input_ids"]
    plain = tokenizer(words, is_split_into_words=True)["input_ids"]
    with_spaces = tokenizer(spaced, is_split_into_words=True)["input_ids"]
    return plain != joined and with_spaces == joined
