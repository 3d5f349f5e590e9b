"""Predict labels, answers or rankings with a kept model (`finetune predict`)."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc import flags
from megaenc.atomic_io import atomic_write
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.errors import InputError, first_error_line, handle_command_errors
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets import formats
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.datasets.pair_rows import merge_queries
from megaenc.finetune.examples import (
    SEQUENCE_FAMILIES,
    Dataset,
    Examples,
    Question,
    RankingQuery,
    TaggedWords,
    TaskFamily,
)
from megaenc.finetune.results.files import MODEL_DETAILS
from megaenc.hf.checkpoint import shorten_repr
from megaenc.json_files import read_json_object
from megaenc.output_paths import check_output_file, create_parent_dir

_TOKENS_PER_FORWARD = 4096


@dataclass(frozen=True)
class PredictConfig:
    """Options of `megaenc finetune predict`: trained model, input and output file.

    Each field is a flag; `model` and `input` must not stay empty. `input` is a JSONL, CSV, TSV,
    Parquet, CoNLL or SQuAD file. `output` is a JSONL file, "" for standard output, and `overwrite`
    permits replacing it. `all_scores` adds the probability of every label, and is refused unless
    the model is of SC or MULTI_LABEL. Only `predict_main` checks all this.
    """

    model: str = ""
    """directory that `megaenc finetune run --save-model` or `grid --keep` wrote"""
    input: str = ""
    """JSONL, CSV, TSV, Parquet, CoNLL or SQuAD file with `text` (and `text_pair`), `tokens`,
    `question` and `context`, or `query`, `document` and maybe `negatives`; labels are ignored"""
    output: str = ""
    """JSONL file of predictions, one for each row, in order, or in reranking for each document of
    each query, best first; by default standard output"""
    overwrite: bool = False
    """replace the file of --output if it exists"""
    all_scores: bool = False
    """SC and multi_label: add `scores`, the probability of every label, to each prediction"""


@handle_command_errors
def predict_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc finetune predict`: write a line of JSON for each row of a file.

    A line is the result of `predict`, with the row's `id` if it has one; a reranker writes a line
    for each document of each query, without `id`. The lines go to --output, all at the end. Without
    it they go to stdout, and everything else to stderr. Wrong input, such as a retrieval model or
    an existing --output without --overwrite, exits with 2.

    Args:
        argv: Arguments after `megaenc finetune predict`; None: `sys.argv[1:]`.
    """
    silence_libraries()
    settings = flags.parse(
        PredictConfig, argv, prog="megaenc finetune predict", description=__doc__
    )
    flags.check_given(settings, "finetune predict", "model", "input")
    if settings.output:
        inputs = (settings.model, settings.input)
        check_output_file(
            Path(settings.output), "--output", inputs=inputs, overwrite=settings.overwrite
        )
    directory = Path(settings.model)
    if not os.path.isfile(directory / MODEL_DETAILS):  # False for a name that is too long too
        raise InputError(
            f"--model {directory}: no {MODEL_DETAILS}, "
            "expected a directory that --save-model or --keep wrote"
        )
    family, protocol, pair_template, threshold = _read_details(directory / MODEL_DETAILS)
    if family == TaskFamily.IR:
        raise InputError(
            f"--model {directory}: found a retrieval model; "
            "use it with SentenceTransformer, as its README.md shows"
        )
    if not os.path.isfile(settings.input):
        raise InputError(
            f"--input {settings.input}: no such file; expected {formats.EXPECTED_FORMATS}"
        )
    rows = list(formats.read_rows(Path(settings.input)))
    if not rows:
        raise InputError(f"--input {settings.input}: holds no row, expected at least one")
    if settings.all_scores and family not in (TaskFamily.SC, TaskFamily.MULTI_LABEL):
        raise InputError(
            f"--all-scores: found a model of {family}, expected one of SC or multi_label: "
            "labels of single texts or pairs"
        )
    examples = _build_examples(family, rows, pair_template)
    # Without a file, standard output has only the predictions.
    with contextlib.nullcontext() if settings.output else contextlib.redirect_stdout(sys.stderr):
        predictions = predict(
            directory,
            family,
            protocol,
            examples,
            all_scores=settings.all_scores,
            threshold=threshold,
        )
    lines = []
    for index, prediction in enumerate(predictions):
        # A reranker merges rows.
        if family != TaskFamily.RERANKING and "id" in rows[index][1]:
            prediction = {"id": rows[index][1]["id"]} | prediction
        line = json.dumps(prediction, ensure_ascii=False)
        # Lone surrogates, which UTF-8 does not have, are written as escapes.
        lines.append(line.encode("utf-8", "backslashreplace").decode() + "\n")
    if not settings.output:
        sys.stdout.writelines(lines)
        return
    create_parent_dir(Path(settings.output), "--output")
    atomic_write(Path(settings.output), "".join(lines))
    print_rank_0(f"{len(lines):,} predictions: {settings.output}")


def _read_details(file: Path) -> tuple[TaskFamily, FinetuneConfig, str, float]:
    """Return task family, protocol, pair template and threshold of finetuning.json.

    Raises:
        InputError: A field is missing, unknown or of another type, or the template is invalid.
    """
    details = read_json_object(file, "what a run wrote there")
    family = details.get("family")
    if family not in list(TaskFamily):
        raise InputError(
            f"{file}: field `family`: found {shorten_repr(family)}, "
            f"expected one of {', '.join(TaskFamily)}"
        )
    values = details.get("protocol")
    if not isinstance(values, dict):
        raise InputError(
            f"{file}: field `protocol`: found {shorten_repr(values)}, expected the flags of a run"
        )
    protocol = flags.replace_fields(FinetuneConfig(), values, source=f"{file}: protocol")
    pair_template = details.get("pair_template", "")
    if not isinstance(pair_template, str):
        raise InputError(
            f"{file}: field `pair_template`: found {shorten_repr(pair_template)}, expected text"
        )
    if pair_template:
        try:
            DatasetConfig(pair_template=pair_template).check()
        except InputError as error:
            complaint = str(error).removeprefix("--pair-template ")
            raise InputError(f"{file}: field `pair_template`: {complaint}") from None
    threshold = details.get("threshold", 0.5)
    if not isinstance(threshold, float) or not 0 <= threshold <= 1:
        raise InputError(
            f"{file}: field `threshold`: found {shorten_repr(threshold)}, "
            "expected a number from 0.0 to 1.0"
        )
    return TaskFamily(family), protocol, pair_template, threshold


def _read_labels(file: Path) -> tuple[str, ...]:
    """Return the labels of a model from its config.json, in order.

    Raises:
        InputError: They are missing, or no names that differ.
    """
    names = read_json_object(file, "the configuration of a model").get("id2label")
    labels = (
        tuple(names.get(str(index)) for index in range(len(names)))
        if isinstance(names, dict)
        else ()
    )
    if (
        not labels
        or not all(isinstance(label, str) for label in labels)
        or len(set(labels)) < len(labels)
    ):
        value = "no such field" if names is None else f"found {shorten_repr(names)}"
        raise InputError(
            f"{file}: field `id2label`: {value}, "
            'expected names that differ under "0", "1" and so on'
        )
    return labels


def _build_examples(
    family: TaskFamily, rows: Sequence[tuple[str, dict[str, Any]]], pair_template: str
) -> Examples:
    """Return the examples of a family without labels.

    Args:
        pair_template: Template that joins pairs as in training; empty for models of older versions
            that were trained without pairs.

    Raises:
        InputError: A field is missing or wrong; the message names file and line.
    """
    if family == TaskFamily.RERANKING:
        return merge_queries((location, row | {"label": 1}) for location, row in rows)

    def build() -> Iterator[Any]:
        for location, row in rows:
            formats.check_id(row, location)
            if family in SEQUENCE_FAMILIES:
                if row.get("text_pair") and not pair_template:
                    raise InputError(
                        f"{location}: field `text_pair`: expected both texts in `text`, "
                        "joined as in training"
                    )
                label = () if family == TaskFamily.MULTI_LABEL else 0
                yield formats.build_labelled_text(row, location, "", label, pair_template)
            elif family == TaskFamily.TC:
                words = formats.get_value(row, "tokens", location, list)
                if not words or not all(isinstance(word, str) for word in words):
                    raise InputError(
                        f"{location}: field `tokens`: found {str(words)[:40]}, "
                        "expected a list of words"
                    )
                yield TaggedWords("", tuple(words), (0,) * len(words))
            else:
                question = formats.get_value(row, "question", location, str)
                context = formats.get_value(row, "context", location, str)
                yield Question("", question, context, ())

    return list(build())


@contextlib.contextmanager
def _name_failures(place: Path, part: str) -> Iterator[None]:
    """Turn any error of a library in the block into an InputError at `place`.

    Odd fields cause such errors.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:  # also panics of Rust
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{place}: {part} fails: {first_error_line(error)}; expected what a run wrote there"
        ) from None


def predict(
    directory: Path,
    family: TaskFamily,
    protocol: FinetuneConfig,
    examples: Examples,
    *,
    all_scores: bool = False,
    threshold: float = 0.5,
) -> list[dict[str, Any]]:
    """Return the predictions of a fine-tuned model, one for each example, in order.

    A prediction is {"label": name, "score": probability} in SC, {"label": number} in regression,
    {"labels": names, of probability `threshold` or more} in MULTI_LABEL, {"tags": a name for each
    word, O if it was cut off} in TC, and {"answer": text, or ""} in QA; RERANKING has one for each
    document of each query, best first (`rank_documents`). `all_scores` adds {"scores":
    probabilities by label} in SC and MULTI_LABEL. Probabilities have 6 decimals, numbers 7 digits.
    Progress and the number of cut texts are printed. A directory without such a model, a row that
    cannot be tokenized and a score that is NaN or inf are an InputError. The GPU is used if there
    is one.

    Args:
        directory: Directory that --save-model or --keep wrote.
        family, protocol: Those of the model's finetuning.json; IR is not supported.
        examples: Examples of the family; their labels are ignored.
    """
    import torch

    from megaenc.backend.device import detect_backend
    from megaenc.data.tokenizer.special_tokens import read_template
    from megaenc.data.tokenizer.tokenizer import load_tokenizer
    from megaenc.finetune.model.backbone import batch_by_tokens, pack_texts
    from megaenc.finetune.model.load import open_model_directory
    from megaenc.finetune.model.task_class import compute_hf_outputs, find_task_class, set_labels
    from megaenc.finetune.tasks import TASKS
    from megaenc.finetune.tasks.question_answering import extract_answer
    from megaenc.finetune.tokenized import TextEncoder
    from megaenc.hf.model import load_model

    labels = _read_labels(directory / "config.json")
    hf, config = open_model_directory(str(directory))
    set_labels(config, family, labels)
    model_class = find_task_class(config, family)
    architectures = hf.config.get("architectures")
    if model_class is None or architectures != [model_class.__name__]:
        expected = "another task" if model_class is None else f"[{model_class.__name__!r}]"
        raise InputError(
            f"{hf.config_file}: field `architectures`: found {shorten_repr(architectures)}, "
            f"expected {expected}: {MODEL_DETAILS} describes a model of {family}"
        )
    tokenizer = load_tokenizer(directory, "--model")
    with _name_failures(directory, "its tokenizer"):
        template = read_template(tokenizer)
    context = getattr(config, "max_position_embeddings", protocol.max_length)
    if not template.count < protocol.max_length <= context:
        raise InputError(
            f"{directory / MODEL_DETAILS}: field `max_length`: found {protocol.max_length}, "
            f"expected {template.count + 1} to {context} tokens, those that the model reads"
        )
    encoder = TextEncoder(tokenizer, protocol.max_length, template)
    device = detect_backend().device
    model, report = load_model(hf, config, model_class, f"a model of {family}")
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"--model {directory}: no tensor `{missing[0]}`, "
            f"expected all weights of a {type(model).__name__}"
        )
    if foreign := sorted(report["unexpected_keys"]):
        raise InputError(
            f"--model {directory}: found a tensor `{foreign[0]}`, "
            f"which a {type(model).__name__} does not have"
        )
    model = model.to(device)
    task = TASKS[family](Dataset("", family, labels, "", "", "", lambda split: []), protocol)
    with _name_failures(directory, "its tokenizer"):
        data = task.encode(examples, encoder)
    rows = model.get_input_embeddings().num_embeddings
    if wrong := [
        token
        for token in (data.tokens.max(initial=0), config.pad_token_id or 0)
        if not 0 <= token < rows
    ]:
        raise InputError(
            f"--model {directory}: found the token id {wrong[0]}, expected 0 to {rows - 1}, "
            "those of the model; its tokenizer or `pad_token_id` is that of another model"
        )
    if data.truncated_count:
        print_rank_0(
            f"{data.truncated_count:,} of {len(data):,} texts are longer than "
            f"{encoder.max_length} tokens and are cut"
        )
    predictions: list[dict[str, Any]] = [{}] * len(data)
    done = 0
    with torch.inference_mode(), ProgressLine("predicting", total=len(data)) as line:
        for part in batch_by_tokens(data.lengths, _TOKENS_PER_FORWARD):
            with _name_failures(hf.config_file, type(model).__name__):
                outputs = compute_hf_outputs(
                    model, pack_texts(data.gather_rows(part), device)
                ).cpu()
            if not bool(outputs.isfinite().all()):
                raise InputError(
                    f"--model {directory}: computes scores that are NaN or infinite, "
                    "expected a model that was trained"
                )
            if family == TaskFamily.RERANKING:
                for row, score in zip(part, outputs[:, 0].sigmoid().tolist(), strict=True):
                    predictions[row] = {"score": score}
            elif family == TaskFamily.REGRESSION:
                for row, number in zip(part, outputs[:, 0].tolist(), strict=True):
                    predictions[row] = {"label": float(f"{number:.7g}")}
            elif family == TaskFamily.MULTI_LABEL:
                for row, probabilities in zip(
                    part, outputs.double().sigmoid().tolist(), strict=True
                ):
                    by_label = dict(zip(labels, probabilities, strict=True))
                    names = [label for label in labels if by_label[label] >= threshold]
                    predictions[row] = {"labels": names}
                    if all_scores:
                        scores = {label: round(by_label[label], 6) for label in labels}
                        predictions[row]["scores"] = scores
            elif family == TaskFamily.SC:
                for row, probabilities in zip(part, outputs.softmax(-1), strict=True):
                    best = int(probabilities.argmax())
                    scores = [round(score, 6) for score in probabilities.tolist()]
                    predictions[row] = {"label": labels[best], "score": scores[best]}
                    if all_scores:
                        predictions[row]["scores"] = dict(zip(labels, scores, strict=True))
            else:
                lengths = data.lengths[part].tolist()
                for row, token_outputs in zip(part, outputs.split(lengths), strict=True):
                    logits = token_outputs.numpy()
                    if family == TaskFamily.QA:
                        log_odds = logits[:, 1] - logits[:, 0]
                        answer = extract_answer(examples[row].context, log_odds, data, row)
                        predictions[row] = {"answer": answer}
                    else:
                        tags = task.tag_words(logits, data, row, len(examples[row].words))
                        predictions[row] = {"tags": [labels[tag] for tag in tags]}
            done += len(part)
            line.update(done)
    if family == TaskFamily.RERANKING:
        return rank_documents(examples, [prediction["score"] for prediction in predictions])
    return predictions


def rank_documents(
    queries: Sequence[RankingQuery], scores: Sequence[float]
) -> list[dict[str, Any]]:
    """Return a prediction for each document of each query, best first.

    A prediction is {"query": text, "document": text, "score": from 0 to 1, rounded to 7 digits,
    "rank": from 1}. Queries stay in order, and so do documents with equal scores.

    Args:
        queries: Queries with their documents.
        scores: Score of each of their `documents`, in order.
    """
    predictions = []
    start = 0
    for query in queries:
        end = start + len(query.documents)
        ranked = sorted(
            zip(query.documents, scores[start:end], strict=True), key=lambda pair: -pair[1]
        )
        predictions += [
            {
                "query": query.query,
                "document": document,
                "score": float(f"{score:.7g}"),
                "rank": rank,
            }
            for rank, (document, score) in enumerate(ranked, 1)
        ]
        start = end
    return predictions
