"""Small tokenizers with the pipelines, special tokens and classes of families."""

import json
import string
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

Shape = tuple[Tokenizer, dict]  # the dictionary is tokenizer_config.json

MASK = "<|mask|>"
_MERGES = 120

_PROSE = """
The quick brown fox doesn't jump over 12345 lazy dogs in 2024; it sleeps near the naïve café.
There was once a small town between the river and the hills. The people of the town were farmers,
teachers and makers of boats, and they had been there for more than three hundred years. Every
morning they went down to the water, and every evening they came back with something to tell.
"What have you seen today?" the children would ask. "Nothing but rain," said the oldest of them,
"and the light of another house on the other side." They'd heard that story before, but they
wouldn't stop asking, because it's the question which makes an answer worth having.

In the spring of 1987 a stranger arrived. She was a scientist (or so the letter said), and she
wanted to measure how the level of the river changed over time. Her instruments were simple: a
line, a stone, a table of numbers and a great deal of patience. For each day she wrote the date,
the height in metres and the temperature. After 40 days the table showed a clear result: when the
wind came from the west, the water was 0.3 higher than the model had predicted. That is not much,
but it was enough to explain why some of the boats were lost.

The next year the government decided to build a wall. It should protect the houses, the school and
the only road to the market. However, the work was slow, the material was expensive, and no one
could say whether it would ever be finished. We're told that these things take time; I've learned
that they'll take longer. Under the new plan there are two possible ways: first, to make the wall
lower and use what is left for the bridge; second, to leave everything as it is. Which is better?

Most people think about language in the same way. They know thousands of words, and they can form
a new sentence without thinking about the rules. A computer learns from examples instead: it reads
a text, takes one word away and tries to find it again from the others. The more it reads, the
fewer errors it makes. During training the system looks at the same kind of information again and
again, until the general pattern has become part of it. STAN PLARK says HELLO; we're 99 bottles.
"""
_TEXTS = _PROSE.strip().split("\n\n")
_ASCII = [chr(code) for code in range(0x21, 0x7F)]

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _train_bpe(tokenizer: Tokenizer, special: list[str], alphabet: list[str]) -> None:
    """Train the BPE model of `tokenizer` in place, with about _MERGES merges."""
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet) + _MERGES,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)


def _keep_added(tokenizer: Tokenizer, special: list[str]) -> Tokenizer:
    """Return a copy in which the trained tokens other than `special` are ordinary."""
    values = json.loads(tokenizer.to_str())
    added = values["added_tokens"]
    values["added_tokens"] = [token for token in added if token["content"] in special]
    return Tokenizer.from_str(json.dumps(values))


def _byte_level(pre_tokenizer, special: list[str], **model) -> Tokenizer:
    """Train byte-level BPE on the pieces that `pre_tokenizer` makes."""
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    _train_bpe(tokenizer, special, sorted(pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def _split(regex: str) -> pre_tokenizers.Sequence:
    """Return the pre-tokenizer that splits into matches of `regex`, as bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )


def _byte_fallback(special: list[str]) -> Tokenizer:
    """Train BPE as SentencePiece does, with a token for each byte for other text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    # Only training splits at words, so that no piece holds more than one.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    _train_bpe(tokenizer, special + byte_tokens, [*_ASCII, "▁"])
    tokenizer.pre_tokenizer = None
    return _keep_added(tokenizer, special)


def _unigram(before: list, special: list[str], unk: str) -> Tokenizer:
    """Train Unigram on pieces with their space, after the pre-tokenizers `before`."""
    tokenizer = Tokenizer(models.Unigram())
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, metaspace])
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=special,
        unk_token=unk,
        initial_alphabet=[*_ASCII, "▁"],
        show_progress=False,
    )
    # Characters that no text holds would get scores in an order of their own each time.
    characters = "".join(_ASCII)
    tokenizer.train_from_iterator([*_TEXTS, characters, characters[::-1]], trainer)
    # Sums in another order change last digits, and with them the order of pieces.
    values = json.loads(tokenizer.to_str())
    pieces = values["model"]["vocab"][len(special) :]
    rounded = [(piece, round(score, 6)) for piece, score in pieces]
    rounded.sort(key=lambda pair: (-pair[1], pair[0]))
    values["model"]["vocab"][len(special) :] = rounded
    return Tokenizer.from_str(json.dumps(values))


def _template(tokenizer: Tokenizer, single: str, pair: str) -> processors.TemplateProcessing:
    """Return the post-processor of two templates, with the ids of their tokens."""
    names = {part.split(":")[0] for part in pair.split() if not part.startswith("$")}
    tokens = [(name, tokenizer.token_to_id(name)) for name in sorted(names)]
    return processors.TemplateProcessing(single, pair, tokens)


def _begins_with(tokenizer: Tokenizer, first: str) -> processors.TemplateProcessing:
    """Return the post-processor that puts `first` before every text."""
    return _template(tokenizer, f"{first} $A", f"{first} $A {first}:1 $B:1")


def _cls_and_sep(tokenizer: Tokenizer) -> processors.TemplateProcessing:
    """Return BERT's post-processor: `[CLS] A [SEP]`, `[CLS] A [SEP] B [SEP]`."""
    return _template(tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")


def _add_special(tokenizer: Tokenizer, *tokens: str, lstrip: bool = False) -> None:
    """Add special tokens after the vocabulary; `lstrip`: with the space before."""
    added = [AddedToken(token, lstrip=lstrip, normalized=False, special=True) for token in tokens]
    tokenizer.add_special_tokens(added)


def _bert_roles(*tokens: str) -> dict[str, str]:
    """Return the roles that tokens such as [MASK] name."""
    return {f"{token[1:-1].lower()}_token": token for token in tokens}


def bert() -> Shape:
    """BERT and NeoBERT: lower-case WordPiece, [CLS] and [SEP], no end of a text."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece("##")
    # Their order decides between equal counts; what training finds has another each time.
    continuations = [f"##{character}" for character in string.ascii_lowercase + string.digits]
    trainer = trainers.WordPieceTrainer(
        vocab_size=400,
        special_tokens=special + continuations,
        initial_alphabet=[character for character in _ASCII if not character.isupper()],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer = _keep_added(tokenizer, special)
    tokenizer.post_processor = _cls_and_sep(tokenizer)
    return tokenizer, {
        **_bert_roles(*special),
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "tokenize_chinese_chars": True,
    }


def modernbert() -> Shape:
    """ModernBERT and Ettin: bytes, [CLS] and [SEP], and no role for <|endoftext|>."""
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), [])
    tokenizer.normalizer = normalizers.NFC()
    roles = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    _add_special(tokenizer, "<|padding|>", "<|endoftext|>", *roles)
    _add_special(tokenizer, "[MASK]", lstrip=True)
    tokenizer.post_processor = _cls_and_sep(tokenizer)
    return tokenizer, {
        **_bert_roles(*roles, "[MASK]"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
    }


_ROBERTA_ROLES = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}


def roberta() -> Shape:
    """RoBERTa: bytes, `<s> A </s>` and `<s> A </s></s> B </s>`."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), special)
    _add_special(tokenizer, "<mask>", lstrip=True)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends, add_prefix_space=False)
    return tokenizer, {
        **_ROBERTA_ROLES,
        "tokenizer_class": "RobertaTokenizer",
        "add_prefix_space": False,
    }


def xlm_r() -> Shape:
    """XLM-RoBERTa: Unigram without its table of NFKC, and RoBERTa's templates."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = _unigram([pre_tokenizers.WhitespaceSplit()], special, "<unk>")
    _add_special(tokenizer, "<mask>", lstrip=True)
    tokenizer.post_processor = _template(tokenizer, "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    return tokenizer, {**_ROBERTA_ROLES, "tokenizer_class": "XLMRobertaTokenizer"}


def llama2() -> Shape:
    """Llama 2, TinyLlama, Mistral 0.1: byte fallback, a space before every text."""
    tokenizer = _byte_fallback(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = _begins_with(tokenizer, "<s>")
    return tokenizer, {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": None,
        "legacy": False,
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
    }


def llama3() -> Shape:
    """Llama 3: bytes, numbers by threes, reserved tokens."""
    special = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
    ]
    tokenizer = _byte_level(_split(_WORDS), special, ignore_merges=True)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            _begins_with(tokenizer, special[0]),
        ]
    )
    return tokenizer, {
        "bos_token": special[0],
        "eos_token": special[1],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": True,
    }


def gemma() -> Shape:
    """Gemma: byte fallback without a space before a text, `<bos> A`, own <mask>."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = _byte_fallback(special)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    tokenizer.post_processor = _begins_with(tokenizer, "<bos>")
    return tokenizer, {
        **_bert_roles(*special),
        "add_bos_token": True,
        "add_eos_token": False,
        "tokenizer_class": "GemmaTokenizer",
    }


def qwen(*more: str) -> Shape:
    """Qwen2 and Qwen3: bytes after NFC, digit by digit, no token around a text.

    Special tokens, `more` among them, come after the vocabulary.
    """
    tokenizer = _byte_level(_split(_WORDS.replace("{1,3}", "")), [])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False,
        trim_offsets=False,
        use_regex=False,
    )
    end = "<|endoftext|>"
    _add_special(tokenizer, end, "<|im_start|>", "<|im_end|>", "<|fim_pad|>", *more)
    return tokenizer, {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": end,
        "unk_token": None,
        "pad_token": end,
        "errors": "replace",
        "tokenizer_class": "Qwen2Tokenizer",
    }


def smollm() -> Shape:
    """SmolLM: bytes, digit by digit, under GPT-2's class."""
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer = _byte_level(pre_tokenizer, ["<|endoftext|>", "<|im_start|>"])
    return tokenizer, {
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
        "add_prefix_space": False,
        "tokenizer_class": "GPT2Tokenizer",
    }


def t5() -> Shape:
    """T5: Unigram without its table of NFKC, `A </s>` and `A </s> B </s>`."""
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer = _unigram([pre_tokenizers.WhitespaceSplit()], special, "<unk>")
    extra_ids = [f"<extra_id_{index}>" for index in range(8)]
    _add_special(tokenizer, *reversed(extra_ids))
    tokenizer.post_processor = _template(tokenizer, "$A </s>", "$A </s> $B </s>")
    return tokenizer, {
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "extra_ids": len(extra_ids),
        "additional_special_tokens": extra_ids,
        "tokenizer_class": "T5Tokenizer",
    }


def deberta() -> Shape:
    """DeBERTa v3: Unigram, BERT's tokens, [CLS] and [SEP] also begin and end a text."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    tokenizer = _unigram([], special, "[UNK]")
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
            normalizers.NFC(),
            normalizers.Strip(left=False, right=True),
        ]
    )
    _add_special(tokenizer, "[MASK]")
    tokenizer.post_processor = _cls_and_sep(tokenizer)
    return tokenizer, {
        **_bert_roles(*special, "[MASK]"),
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
        "do_lower_case": False,
        "split_by_punct": False,
        "tokenizer_class": "DebertaV2Tokenizer",
    }


SHAPES: dict[str, Callable[[], Shape]] = {
    "bert": bert,
    "modernbert": modernbert,
    "roberta": roberta,
    "xlm-r": xlm_r,
    "llama2": llama2,
    "llama3": llama3,
    "gemma": gemma,
    "qwen": qwen,
    "t5": t5,
    "deberta": deberta,
}


def with_mask(made: Shape) -> Shape:
    """Return a copy with a mask token: its own, or MASK, added as a user would."""
    tokenizer = Tokenizer.from_str(made[0].to_str())
    config = dict(made[1])
    if config.get("mask_token") is None:
        _add_special(tokenizer, MASK)
        config["mask_token"] = MASK
    return tokenizer, config


def save(made: Shape, directory: Path, **changes) -> Path:
    """Write tokenizer.json and, with `changes`, tokenizer_config.json to `directory`."""
    tokenizer, config = made
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps(config | changes)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return directory
