"""Evaluate an exported masked language model on text (`megaenc fill-mask`)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaenc import flags
from megaenc.console import build_rich_console, print_rank_0, silence_libraries
from megaenc.counter_rng import SampleRandomness, permutation
from megaenc.data.sources.resolve import InputConfig, JsonKey, read_texts, resolve_inputs
from megaenc.errors import InputError, handle_command_errors
from megaenc.flags import NonNegativeInt, PositiveFraction, PositiveInt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_GUESSED_SENTENCES = 200  # from which the surest are printed


@dataclass(frozen=True)
class FillMaskConfig:
    """Options of `megaenc fill-mask`: model, text, mask ratio, amounts to evaluate.

    Each field is a flag; `model`, a directory of a masked language model, and `input`, a tuple of
    files, have no default. `json_key`, `encoding` and `delimiter` (None: a comma or a tab) are as
    for `megaenc preprocess`. The fraction `mask` of the first `tokens` tokens is predicted, in
    windows of at most `seq_length`, 0 for the model's most; `sentences` examples are printed.
    """

    model: str
    """Hugging Face directory of a masked language model, as written by `megaenc convert to-hf`;
    causal models are refused."""
    input: tuple[str, ...]
    """Held-out text in any format that `megaenc preprocess` reads."""
    json_key: JsonKey = "text"
    """Key or column that holds the text."""
    encoding: str = "utf-8"
    """Encoding of JSONL, CSV, TSV and text files, such as latin1, cp1252 or utf-16."""
    delimiter: str | None = None
    """Character between the cells of CSV and TSV files, such as ';'; by default a comma in CSV, a
    tab in TSV."""
    mask: PositiveFraction = 0.4
    """Fraction of the tokens to mask, like the option `mask` of the objective mlm."""
    tokens: PositiveInt = 100_000
    """Number of tokens to evaluate on, from the start of the text."""
    seq_length: NonNegativeInt = 0
    """Most tokens of a window; two models are comparable if it is the same. 0: as many as model and
    tokenizer read."""
    sentences: NonNegativeInt = 8
    """Number of sentences to print, each with one masked word and the model's guesses: those with
    the surest guesses of 200."""


@dataclass(frozen=True)
class MaskScore:
    """Accuracy and loss of a model on masked tokens.

    `accuracy` and `most_frequent_accuracy`, that of always guessing the most frequent masked token,
    are fractions of the `token_count` masked tokens that were scored. `loss` is their mean
    cross-entropy in nats.
    """

    token_count: int
    accuracy: float
    loss: float
    """Mean cross-entropy of the masked tokens in nats."""
    most_frequent_accuracy: float
    """Accuracy of always guessing the most frequent of the masked tokens."""


@dataclass(frozen=True)
class MaskedSentence:
    """Sentence with one masked word, and the text before and after the word.

    `before + word + after` is the sentence.
    """

    before: str
    word: str
    after: str


def load_masked_lm(directory: str | Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """Return a directory's masked language model and tokenizer, ready for evaluation.

    The model is float32, in eval mode and on the machine's accelerator, if there is one. A decoder
    with bidirectional attention is accepted. A model that predicts a token from `prediction_shift`
    (config.json) positions earlier gets its logits moved to the token's position; the first
    `prediction_shift` positions have logits of 0.

    Raises:
        InputError: The directory holds no masked language model with a mask token.
    """
    from megaenc.backend.device import detect_backend
    from megaenc.data.tokenizer.tokenizer import load_tokenizer
    from megaenc.hf import model as hf_model
    from megaenc.hf.checkpoint import HFCheckpoint

    hf = HFCheckpoint(Path(directory), "--model")
    tokenizer = load_tokenizer(directory, "--model")
    if tokenizer.mask_token_id is None:
        raise InputError(f"--model {directory}: its tokenizer has no mask token, expected one")
    model = hf_model.load_masked_lm(hf, hf_model.load_hf_config(hf))
    shift = getattr(model.config, "prediction_shift", 0)

    def move(module: Any, inputs: Any, output: Any) -> None:
        output.logits = output.logits.roll(shift, dims=1)
        output.logits[:, :shift] = 0

    if shift:
        model.register_forward_hook(move)
    return model.to(detect_backend().device), tokenizer


def compute_mask_score(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    texts: Iterator[str],
    mask: float,
    limit: int,
    seq_length: int = 0,
) -> MaskScore:
    """Return a model's accuracy and loss on masked tokens of the documents `texts`.

    Documents get the tokenizer's special tokens, or at least an EOS, and are split into windows.
    Masks are the same in every call. A window's first token is not scored. If no token can be
    masked, or the model reads fewer tokens than `seq_length`, it is an InputError.

    Args:
        model, tokenizer: Result of `load_masked_lm`.
        mask: Probability that the mask token replaces a token, above 0 and at most 1.
        limit: Maximum tokens to read from the start of `texts`, special tokens included.
        seq_length: Maximum tokens of a window; 0: the most that model and tokenizer read.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from megaenc.data.packing.packed_dataset import Pack
    from megaenc.data.tokenizer.tokenizer import read_vocabulary
    from megaenc.objectives.masking import MaskedLanguageModeling

    vocabulary = read_vocabulary(tokenizer)
    objective = MaskedLanguageModeling(vocabulary, mask=mask)
    targets = []
    length = choose_window_length(seq_length, model, tokenizer)
    for index, window in enumerate(_iterate_windows(tokenizer, texts, length, limit)):
        pack = Pack(index, 0, window, np.array([0, len(window)], dtype=np.int32))
        targets.append(objective.targets(pack, SampleRandomness(0, index, 0)))
    # Stable. Windows of a batch are of about one length.
    targets.sort(key=lambda target: len(target.inputs))
    hidden_labels = [np.zeros(0, dtype=np.int64)]
    loss = 0.0
    correct = 0
    start = 0
    while start < len(targets):
        # Bounds the memory of the logits: at most 2**25 (128 MiB) a batch, or one longer window.
        rows = max(
            1,
            (1 << 25) // (vocabulary.size * len(targets[min(start + 31, len(targets) - 1)].inputs)),
        )
        batch = targets[start : start + min(rows, 32)]
        start += len(batch)
        windows = [torch.from_numpy(target.inputs.astype(np.int64)) for target in batch]
        tokens = pad_sequence(windows, batch_first=True, padding_value=vocabulary.mask_id)
        attention_mask = pad_sequence(
            [torch.ones_like(window) for window in windows], batch_first=True
        )
        with torch.inference_mode():
            logits = model(
                input_ids=tokens.to(model.device), attention_mask=attention_mask.to(model.device)
            ).logits
        for window_logits, target in zip(logits, batch, strict=True):
            # With shifted predictions the first token has none.
            has_prediction = target.predict_at > 0
            scored = window_logits[
                torch.from_numpy(target.predict_at[has_prediction]).to(logits.device)
            ].float()
            labels = torch.from_numpy(target.labels[has_prediction]).to(logits.device)
            correct += int((scored.argmax(-1) == labels).sum())
            loss += float(torch.nn.functional.cross_entropy(scored, labels, reduction="sum"))
            hidden_labels.append(target.labels[has_prediction])
    labels = np.concatenate(hidden_labels)
    if not len(labels):
        raise InputError(f"--input: found no token to hide with --mask {mask}, expected more text")
    most_frequent = int(np.bincount(labels).max()) / len(labels)
    return MaskScore(len(labels), correct / len(labels), loss / len(labels), most_frequent)


def choose_window_length(
    seq_length: int, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast"
) -> int:
    """Return `seq_length`, or if it is 0 the most tokens that can be read.

    The most is the lower of the model's and the tokenizer's maximum. A length above 0 is compared
    only with the model's.

    Raises:
        InputError: The model reads fewer tokens than `seq_length`.
    """
    from megaenc.hf.model import find_position_offset

    context = model.config.max_position_embeddings - find_position_offset(model)
    if seq_length > context:
        raise InputError(
            f"--seq-length: found {seq_length}, "
            f"expected at most the {context} tokens that the model reads"
        )
    return seq_length or min(context, tokenizer.model_max_length)


def _iterate_windows(
    tokenizer: Any, texts: Iterator[str], length: int, limit: int
) -> Iterator[np.ndarray]:
    """Yield windows, int64[<= `length`], of the first `limit` tokens of `texts`."""
    from megaenc.data.tokenizer.special_tokens import resolve_special_tokens
    from megaenc.data.tokenizer.tokenizer import encode_documents

    special = resolve_special_tokens(tokenizer, "")
    while batch := list(islice(texts, 64)):
        for document in encode_documents(tokenizer, batch):
            tokens = special.surround(document)[:limit]
            limit -= len(tokens)
            yield from (tokens[start : start + length] for start in range(0, len(tokens), length))
            if not limit:
                return


_SENTENCE = re.compile(r"(?<![^\n ])[A-Z][a-z]*(?:,? [A-Za-z'-]+){7,24}\.(?=\s|$)")
_WORD = re.compile(r"(?<= )[a-z]{4,}(?=[ ,.])")
# Guesses of function words are not informative.
_FUNCTION_WORDS = """
    about after also although another because been before being below between both cannot could does
    done each either else even ever every from given have having here however into itself just like
    made make many more most much must never none only onto other over same should since some such
    than that their them then there therefore these they this those through thus together under
    unless until used uses using very want well were what when where whether which while will with
    within without would your
"""


def choose_masked_sentences(
    tokenizer: "PreTrainedTokenizerFast", texts: Iterator[str], count: int
) -> list[MaskedSentence]:
    """Return at most `count` sentences with one masked content word, by a fixed seed.

    The sentences have 8 to 25 words of ASCII letters, and are of different documents, in the order
    of `texts`, which is read to its end. The masked word is one token of `tokenizer`.
    """
    sentences = []
    function_words = _FUNCTION_WORDS.split()
    for document_index, text in enumerate(texts):
        choices = [
            MaskedSentence(sentence[: word.start()], word[0], sentence[word.end() :])
            for sentence in (match[0] for match in _SENTENCE.finditer(text))
            for word in _WORD.finditer(sentence)
            if word[0] not in function_words
            and len(tokenizer.encode(" " + word[0], add_special_tokens=False)) == 1
        ]
        if choices:
            sentences.append(
                choices[
                    int(
                        SampleRandomness(0, document_index, 0).uniforms("riddle", 1)[0]
                        * len(choices)
                    )
                ]
            )
    return [sentences[index] for index in sorted(permutation(0, "riddles", len(sentences))[:count])]


def predict_masked_words(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", sentences: list[MaskedSentence]
) -> list[list[tuple[str, float]]]:
    """Return the three most likely guesses of each sentence's masked word, best first.

    Unlike transformers' fill-mask pipeline, it accepts decoders. A sentence must not be longer than
    the model's maximum, which is not checked.

    Args:
        model, tokenizer: Result of `load_masked_lm`.

    Returns:
        For each sentence, three pairs (token text without spaces around it, probability from 0 to
        1). A blank token is shown as its `repr`.
    """
    import torch

    predictions = []
    for sentence in sentences:
        inputs = tokenizer(
            sentence.before + tokenizer.mask_token + sentence.after, return_tensors="pt"
        ).to(model.device)
        position = int((inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0])
        with torch.inference_mode():
            logits = model(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            ).logits[0, position]
        best = logits.softmax(-1).topk(3)
        words = [tokenizer.decode([token]) for token in best.indices.tolist()]
        predictions.append(
            [
                (word.strip() or repr(word), probability)
                for word, probability in zip(words, best.values.tolist(), strict=True)
            ]
        )
    return predictions


def build_table(sentences: list[MaskedSentence], guesses: list[list[tuple[str, float]]]) -> Any:
    """Return a `rich.table.Table` of sentences with a gap, masked words and guesses.

    Each sentence has a row. Correct guesses are marked.

    Args:
        guesses: Result of `predict_masked_words` for `sentences`.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, leading=1)
    table.add_column("held-out sentence, one word hidden", ratio=3)
    table.add_column("hidden")
    table.add_column("guesses", ratio=1, min_width=16)
    for masked, best in zip(sentences, guesses, strict=True):
        lines = [
            Text(
                f"{'✓' if word == masked.word else ' '} {word} {100 * probability:.0f} %",
                "bold green" if word == masked.word else "",
            )
            for word, probability in best
        ]
        sentence = Text.assemble(masked.before, ("_____", "bold"), masked.after)
        table.add_row(sentence, Text(masked.word), Text("\n").join(lines))
    return table


def print_surest(
    sentences: list[MaskedSentence], guesses: list[list[tuple[str, float]]], count: int
) -> None:
    """Print the sentences with the most probable first guesses, and the accuracy.

    The accuracy is that of the first guesses of all `sentences`. Without sentences nothing is
    printed.

    Args:
        guesses: Result of `predict_masked_words` for `sentences`.
        count: Number of sentences to print.
    """
    if not sentences:
        return
    surest = sorted(range(len(sentences)), key=lambda index: -guesses[index][0][1])[:count]
    build_rich_console().print(
        build_table([sentences[index] for index in surest], [guesses[index] for index in surest])
    )
    right = sum(best[0][0] == masked.word for masked, best in zip(sentences, guesses, strict=True))
    print_rank_0(
        f"the {len(surest)} sentences with the surest guesses of {len(sentences)}; "
        f"the first guess is right in {100 * right / len(sentences):.1f} % of all {len(sentences)}"
    )


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc fill-mask`: print guesses of masked words and the accuracy.

    --input is ordinary text, in which the command itself masks words and tokens. Wrong input exits
    with 2.

    Args:
        argv: Arguments after `megaenc fill-mask`; None: `sys.argv[1:]`.
    """
    silence_libraries()
    settings = flags.parse(FillMaskConfig, argv, prog="megaenc fill-mask", description=__doc__)
    source = InputConfig(settings.input, encoding=settings.encoding, delimiter=settings.delimiter)
    inputs = resolve_inputs(source, [settings.json_key])
    # Reports wrong input before the model is loaded.
    next(read_texts(inputs, settings.json_key), None)
    model, tokenizer = load_masked_lm(settings.model)
    length = choose_window_length(settings.seq_length, model, tokenizer)
    if settings.sentences:
        count = max(settings.sentences, _GUESSED_SENTENCES)
        sentences = choose_masked_sentences(tokenizer, read_texts(inputs, settings.json_key), count)
        print_surest(
            sentences, predict_masked_words(model, tokenizer, sentences), settings.sentences
        )
    texts = read_texts(inputs, settings.json_key)
    score = compute_mask_score(model, tokenizer, texts, settings.mask, settings.tokens, length)
    print_rank_0(
        f"{settings.model}: "
        f"{100 * score.accuracy:.1f} % of {score.token_count:,} hidden tokens guessed; "
        f"always the most frequent token: {100 * score.most_frequent_accuracy:.1f} %; "
        f"loss {score.loss:.4f} in windows of at most {length:,} tokens"
    )
