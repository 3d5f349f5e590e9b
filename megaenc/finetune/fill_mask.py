"""Hidden words and who guesses them: an exported encoder against text that it has not seen."""

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
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.config import check_minimums

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class FillMaskConfig:
    """What `megaenc fill-mask` takes."""

    model: str
    """Hugging Face folder of a model that fills masks, as `megaenc convert to-hf` writes it: any but a causal one."""
    input: tuple[str, ...]
    """Text that the model has not seen, from all that `megaenc preprocess` reads."""
    json_key: str = "text"
    """Key or column of the text."""
    mask: float = 0.4
    """Share of the tokens to hide, as mlm's option of that name."""
    tokens: int = 100_000
    """Tokens to read; the rest of the text is left alone."""
    sentences: int = 8
    """Sentences to show, each with one word hidden."""


@dataclass(frozen=True)
class MaskScore:
    """How often the most likely guess was right."""

    token_count: int
    accuracy: float
    most_frequent_accuracy: float
    """The accuracy of always guessing the token that is most frequent among the hidden ones."""


@dataclass(frozen=True)
class MaskedSentence:
    """A sentence with one word hidden."""

    before: str
    word: str
    after: str


def load_masked_lm(folder: str | Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """Load the model, in float32 on this machine's device, and its tokenizer. Raises InputError if the folder holds none.

    A decoder that reads both ways (`is_causal: false` in config.json) counts as a masked language model. Logits that stand before
    their tokens (`prediction_shift` in config.json) are moved to them; a token too near the start gets equal logits.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
    from transformers.utils.logging import disable_progress_bar

    from megaenc.backend.device import detect_backend
    from megaenc.convert.hf_checkpoint import HFCheckpoint
    from megaenc.convert.hf_model import load_hf_config, load_model
    from megaenc.data.tokenizer.tokenizer import load_tokenizer

    disable_progress_bar()
    hf = HFCheckpoint(Path(folder), "--model")
    tokenizer = load_tokenizer(folder)
    if tokenizer.mask_token_id is None:
        raise InputError(f"--model {folder}: its tokenizer has no mask token, expected one")
    config = load_hf_config(hf)
    decoder = any(name.endswith("ForCausalLM") for name in config.architectures or ())
    if decoder and getattr(config, "is_causal", True):
        raise InputError(f"--model {folder}: {config.architectures[0]} reads causally; expected a masked language model")
    kind = (MODEL_FOR_CAUSAL_LM_MAPPING if decoder else MODEL_FOR_MASKED_LM_MAPPING).get(type(config), None)
    if not isinstance(kind, type) or not hasattr(config, "max_position_embeddings"):
        raise InputError(f"--model {folder}: found a {config.model_type} model; expected a masked language model")
    model, report = load_model(hf, config, kind, "a masked language model")
    if report["missing_keys"]:
        raise InputError(f"--model {folder}: no weights `{min(report['missing_keys'])}`; expected a masked language model")
    shift = getattr(model.config, "prediction_shift", 0)

    def move(module: Any, inputs: Any, output: Any) -> None:
        output.logits = output.logits.roll(shift, dims=1)
        output.logits[:, :shift] = 0

    if shift:
        model.register_forward_hook(move)
    return model.eval().to(detect_backend().device), tokenizer


def compute_mask_score(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", texts: Iterator[str], mask: float, limit: int
) -> MaskScore:
    """Hide tokens as `mlm(mask=...)` does in training, in the first `limit` tokens of `texts`, and count the right guesses.

    Documents end with the end-of-sequence token and are cut into windows of the model's length, or the tokenizer's where that is
    less; the first token of a window is not scored. The masks are the same each time. Raises InputError if nothing can be hidden.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from megaenc.data.packing.packed_dataset import Pack
    from megaenc.data.tokenizer.tokenizer import read_vocabulary
    from megaenc.objectives.masking import MaskedLanguageModeling

    vocabulary = read_vocabulary(tokenizer)
    objective = MaskedLanguageModeling(vocabulary, mask=mask)
    targets = []
    length = min(model.config.max_position_embeddings, tokenizer.model_max_length)  # what it can read, what it is used for
    for number, window in enumerate(_iterate_windows(tokenizer, texts, length, limit)):
        pack = Pack(number, 0, window, np.array([0, len(window)], dtype=np.int32))
        targets.append(objective.targets(pack, SampleRandomness(0, number, 0)))
    targets.sort(key=lambda target: len(target.inputs))  # stable: windows of a batch are of about one length
    hidden, correct, at = [np.zeros(0, dtype=np.int64)], 0, 0
    while at < len(targets):
        # Logits are the largest thing here: at most 2**25 of them (128 MiB) a batch, unless one window has more.
        rows = max(1, (1 << 25) // (vocabulary.size * len(targets[min(at + 31, len(targets) - 1)].inputs)))
        batch = targets[at : at + min(rows, 32)]
        at += len(batch)
        windows = [torch.from_numpy(target.inputs.astype(np.int64)) for target in batch]
        tokens = pad_sequence(windows, batch_first=True, padding_value=vocabulary.mask_id)
        seen = pad_sequence([torch.ones_like(window) for window in windows], batch_first=True)
        with torch.inference_mode():
            logits = model(input_ids=tokens.to(model.device), attention_mask=seen.to(model.device)).logits
        for guesses, target in zip(logits.argmax(-1).cpu().numpy(), batch, strict=True):
            # Where predictions stand before their tokens, the first token has none.
            asked = target.predict_at > 0
            correct += int((guesses[target.predict_at[asked]] == target.labels[asked]).sum())
            hidden.append(target.labels[asked])
    labels = np.concatenate(hidden)
    if not len(labels):
        raise InputError(f"--input: found no token to hide with --mask {mask}, expected more text")
    return MaskScore(len(labels), correct / len(labels), int(np.bincount(labels).max()) / len(labels))


def _iterate_windows(tokenizer: Any, texts: Iterator[str], length: int, limit: int) -> Iterator[np.ndarray]:
    """Yield int64[at most `length`] until `limit` tokens are out."""
    from megaenc.data.tokenizer.tokenizer import encode_documents

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    while some := list(islice(texts, 64)):
        for document in encode_documents(tokenizer, some):
            tokens = np.concatenate([document, end]).astype(np.int64)[:limit]
            limit -= len(tokens)
            yield from (tokens[start : start + length] for start in range(0, len(tokens), length))
            if not limit:
                return


_SENTENCE = re.compile(r"(?<![^\n ])[A-Z][a-z]*(?:,? [A-Za-z'-]+){7,24}\.(?=\s|$)")
_WORD = re.compile(r"(?<= )[a-z]{4,}(?=[ ,.])")
# Guessing function words says little.
_FUNCTION_WORDS = """
    about after also although another because been before being below between both cannot could does done each either else
    even ever every from given have having here however into itself just like made make many more most much must never none
    only onto other over same should since some such than that their them then there therefore these they this those through
    thus together under unless until used uses using very want well were what when where whether which while will with within
    without would your
"""


def choose_masked_sentences(tokenizer: "PreTrainedTokenizerFast", texts: Iterator[str], count: int) -> list[MaskedSentence]:
    """Choose `count` plain sentences, at most one a document, each with a one-token content word hidden, whatever the model."""
    found, function_words = [], _FUNCTION_WORDS.split()
    for number, text in enumerate(texts):
        choices = [
            MaskedSentence(sentence[: word.start()], word[0], sentence[word.end() :])
            for sentence in (match[0] for match in _SENTENCE.finditer(text))
            for word in _WORD.finditer(sentence)
            if word[0] not in function_words and len(tokenizer.encode(" " + word[0], add_special_tokens=False)) == 1
        ]
        if choices:
            found.append(choices[int(SampleRandomness(0, number, 0).uniforms("riddle", 1)[0] * len(choices))])
    return [found[at] for at in sorted(permutation(0, "riddles", len(found))[:count])]


def predict_masked_words(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", asked: list[MaskedSentence]
) -> list[list[tuple[str, float]]]:
    """Return the three most likely tokens for each riddle with their probabilities, as transformers' fill-mask pipeline does.

    The pipeline does not take decoders.
    """
    import torch

    found = []
    for riddle in asked:
        inputs = tokenizer(riddle.before + tokenizer.mask_token + riddle.after, return_tensors="pt").to(model.device)
        at = int((inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0])
        with torch.inference_mode():
            logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[0, at]
        best = logits.softmax(-1).topk(3)
        words = [tokenizer.decode([token]) for token in best.indices.tolist()]
        found.append([(word.strip() or repr(word), share) for word, share in zip(words, best.values.tolist(), strict=True)])
    return found


def build_table(asked: list[MaskedSentence], guesses: list[list[tuple[str, float]]]) -> Any:
    """Return rich's Table of riddles and guesses; the right ones are marked."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, leading=1)
    shown.add_column("held-out sentence, one word hidden", ratio=3)
    shown.add_column("hidden")
    shown.add_column("guesses", ratio=1, min_width=16)
    for riddle, best in zip(asked, guesses, strict=True):
        lines = [
            Text(f"{'✓' if word == riddle.word else ' '} {word} {100 * share:.0f} %", "bold green" if word == riddle.word else "")
            for word, share in best
        ]
        sentence = Text.assemble(riddle.before, ("_____", "bold"), riddle.after)
        shown.add_row(sentence, Text(riddle.word), Text("\n").join(lines))
    return shown


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc fill-mask`."""
    silence_libraries()
    settings = flags.parse(FillMaskConfig, argv, prog="megaenc fill-mask", description=__doc__)
    if not 0 < settings.mask <= 1:
        raise InputError(f"--mask: found {settings.mask}, expected mlm's option `mask`: a share of the tokens above 0, at most 1")
    check_minimums(settings, tokens=1, sentences=0)
    from megaenc.data.sources.resolve import InputConfig, read_texts, resolve_inputs

    inputs = resolve_inputs(InputConfig(settings.input), [settings.json_key])
    next(read_texts(inputs, settings.json_key), None)  # a wrong input is said before anything is loaded
    model, tokenizer = load_masked_lm(settings.model)
    asked = choose_masked_sentences(tokenizer, read_texts(inputs, settings.json_key), settings.sentences)
    if asked:
        build_rich_console().print(build_table(asked, predict_masked_words(model, tokenizer, asked)))
    found = compute_mask_score(model, tokenizer, read_texts(inputs, settings.json_key), settings.mask, settings.tokens)
    print_rank_0(
        f"{settings.model}: {100 * found.accuracy:.1f} % of {found.token_count:,} hidden tokens guessed; "
        f"always the most frequent token: {100 * found.most_frequent_accuracy:.1f} %"
    )
