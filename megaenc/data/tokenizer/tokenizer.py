"""Tokenizers: loading one, what the rest needs to know of it, and training one."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaenc.data.tokenizer.fast_encode import FastEncoder, replace_surrogates
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, first_error_line
from megaenc.json_files import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS, MASK = "<|eos|>", "<|mask|>"
MIN_VOCABULARY = 258  # 256 bytes and the two special tokens
MAX_VOCABULARY = 2**31 - 1
MAX_TEXT_LENGTH = 2048  # tokens: the context of the encoders, where `truncation=True` cuts

_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # of the files that transformers reads for a tokenizer
# The pad role is not here: no corpus holds padding, and giving a tokenizer a pad token for fine-tuning does not make it another
# one.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(name_or_dir: str | Path) -> "PreTrainedTokenizerFast":
    """Load a Hugging Face fast tokenizer from a folder or by its name on the Hub. Raises InputError when there is none."""
    name = str(name_or_dir)
    folder = Path(name)
    # The Hub is asked, patiently, for anything that can be a name there (`name` or `owner/name`), so a path is not.
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and os.path.isdir(folder.parent))
    is_folder = os.path.isdir(folder)  # False for a name that is too long too
    if not is_folder and (is_path or os.path.exists(folder)):
        raise InputError(f"--tokenizer {name}: no such folder; expected a folder with tokenizer.json, or a name on the Hub")
    from transformers import AutoTokenizer

    local = {"config": _build_class_config(folder), "local_files_only": True} if is_folder else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **local)
    except BaseException as error:  # nearly anything: OSError, KeyError, JSON and HTTP errors, panics of tokenizers' Rust
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if is_folder and not (folder / "tokenizer.json").exists():
            raise InputError(
                f"--tokenizer {name}: the folder holds no tokenizer.json; expected a Hugging Face fast tokenizer"
            ) from None
        what = "tokenizer.json cannot be loaded" if is_folder else "neither a folder nor a name that the Hub answers to"
        reason = first_error_line(error, 160)
        raise InputError(f"--tokenizer {name}: {what}; expected a Hugging Face fast tokenizer ({reason})") from None
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"--tokenizer {name}: a slow tokenizer ({type(tokenizer).__name__}); expected one with tokenizer.json")
    return tokenizer


def _build_class_config(folder: Path) -> Any:
    """Build the model config by which transformers chooses a tokenizer's class, of what config.json says on that and no more.

    InputError for a file of the folder that could block or lead to another folder.
    """
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        files = sorted(file for file in folder.iterdir() if file.suffix in _TEXT_SUFFIXES)
    except OSError as error:
        raise InputError(f"--tokenizer {folder}: {error.strerror}; expected a folder that can be read") from None
    for file in files:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise InputError(f"{file}: not a regular file; expected one of a Hugging Face tokenizer")
    values, of_tokenizer = (
        read_json_object(folder / file, "an object as transformers writes it") if (folder / file).exists() else {}
        for file in ("config.json", "tokenizer_config.json")
    )
    versions = of_tokenizer.get("fast_tokenizer_files", [])
    if not isinstance(versions, list) or any(not isinstance(file, str) or Path(file).name != file for file in versions):
        raise InputError(f"{folder / 'tokenizer_config.json'}: field `fast_tokenizer_files`: expected names of files next to it")
    model_type = values.get("model_type")
    if model_type == "mistral" and "layer_types" in values:  # as transformers' AutoConfig takes it
        model_type = "ministral"
    config = PreTrainedConfig()
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        with contextlib.suppress(Exception):  # two kinds of images have no settings to begin with
            config = CONFIG_MAPPING[model_type]()
    config.name_or_path = str(folder)
    for name in ("tokenizer_class", "model_name"):
        if isinstance(values.get(name), str):
            setattr(config, name, values[name])
    if isinstance(model_type, str):
        config.model_type = model_type
    return config


def read_vocabulary(tokenizer: "PreTrainedTokenizerFast") -> Vocabulary:
    """The size, special ids and fingerprint of a tokenizer."""
    ids = tokenizer.get_vocab().values()
    special = {token for token in tokenizer.all_special_ids if token is not None}
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return Vocabulary(
        size=max(len(tokenizer), max(ids, default=-1) + 1),
        eos_id=tokenizer.eos_token_id,
        mask_id=tokenizer.mask_token_id,
        special_ids=tuple(sorted(special)),
        fingerprint=_compute_fingerprint(tokenizer),
    )


def get_encoder(tokenizer: "PreTrainedTokenizerFast") -> FastEncoder:
    """The encoder of plain text that belongs to `tokenizer` (see megaenc.data.tokenizer.fast_encode)."""
    return _encoder(tokenizer.backend_tokenizer.to_str())


_encoder = lru_cache(maxsize=4)(FastEncoder)


def encode_documents(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids of each text as plain text, uint32[tokens]; which ids, megaenc.data.tokenizer.fast_encode says."""
    return get_encoder(tokenizer)(texts)


def decode_in_spans(tokenizer: "PreTrainedTokenizerFast", ids: Sequence[int]) -> list[tuple[int, str]]:
    """`ids` as runs of (how many, their text): the shortest that cut no character in two, for one may take several tokens.

    The texts joined are the text of all ids. A character of which `ids` holds only a part is U+FFFD. For a pack's worth of ids:
    the time grows with the square of their number.
    """
    decode, ids = tokenizer.backend_tokenizer.decode, [int(token) for token in ids]
    whole = decode(ids, skip_special_tokens=False)
    # A place is between two characters if what is decoded up to it stays as it is, whatever comes later.
    cuts, shortest = [], len(whole)
    for end in range(len(ids), 0, -1):
        text = decode(ids[:end], skip_special_tokens=False)
        if len(text) <= shortest and whole.startswith(text):
            cuts.append((end, len(text)))
            shortest = len(text)
    runs, ended, written = [], 0, 0
    for end, length in reversed(cuts):
        if length > written or not runs:
            runs.append((end - ended, whole[written:length]))
        else:  # these tokens add no text
            runs[-1] = (runs[-1][0] + end - ended, runs[-1][1])
        ended, written = end, length
    return runs


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE of at most `vocab_size` ids; the same texts give the same tokenizer.

    `<|eos|>` (id 0) ends a document and pads, `<|mask|>` (id 1) hides a token. Any text survives encoding and decoding
    unchanged. A small corpus may give fewer ids. Raises InputError when `vocab_size` has no room for the bytes.
    """
    if vocab_size < MIN_VOCABULARY:
        raise InputError(
            f"--vocab-size {vocab_size}: expected at least {MIN_VOCABULARY}, the 256 bytes and two special tokens"
        )
    if vocab_size > MAX_VOCABULARY:
        raise InputError(
            f"--vocab-size {vocab_size}: expected at most {MAX_VOCABULARY}, as many as token ids of 32 bits can be"
        )
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    # A word carries the space before it, so the mask token swallows that space: "The <|mask|> sat" asks for " cat", not for
    # "cat".
    mask = AddedToken(MASK, lstrip=True, normalized=False, special=True)
    eos = AddedToken(EOS, normalized=False, special=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[eos, mask],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(map(replace_surrogates, texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        pad_token=eos,
        mask_token=mask,
        model_max_length=MAX_TEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _compute_fingerprint(tokenizer: "PreTrainedTokenizerFast") -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    del backend["padding"], backend["truncation"]
    backend["added_tokens"].sort(key=lambda token: token["id"])
    roles = {role: None if (token := getattr(tokenizer, role)) is None else str(token) for role in _ROLES}
    canonical = json.dumps({"backend": backend, "roles": roles}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
