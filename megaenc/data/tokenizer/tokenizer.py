"""Loading, training and inspection of Hugging Face fast tokenizers."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaenc.data.tokenizer.fast_encode import FastEncoder, replace_surrogates
from megaenc.data.tokenizer.special_tokens import drop_template
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.data.tokenizer.word_codes import compute_word_codes
from megaenc.errors import InputError, first_error_line
from megaenc.json_files import read_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

EOS = "<|eos|>"
MASK = "<|mask|>"
MIN_VOCABULARY = 258  # 256 bytes and two special tokens
MAX_VOCABULARY = 2**31 - 1  # 32-bit token ids
MAX_TEXT_LENGTH = 2048  # tokens at which `truncation=True` cuts
MAX_WORD_BYTES = 1000
"""Length at which training cuts words, runs of spaces and the like; its time grows with the square
of a word's length."""

_STOP_SECONDS = 1  # for the texts being read when a signal comes

# The template that transformers gives to a tokenizer without one, whose two fingerprints are
# therefore equal.
_EMPTY_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
# Of the files that transformers reads for a tokenizer.
_TEXT_SUFFIXES = (".json", ".jinja", ".model", ".txt")
# Without the pad role: no corpus holds padding, and a pad token added for fine-tuning keeps the
# tokenizer the same.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


def load_tokenizer(name_or_dir: str | Path, flag: str = "--tokenizer") -> "PreTrainedTokenizerFast":
    """Return the Hugging Face fast tokenizer in a directory or of a Hub name.

    No code of the tokenizer is run. A name that is no directory is looked up on the Hub.

    Raises:
        InputError: It is missing, unreadable, or no fast tokenizer (one with tokenizer.json); the
            message begins with `flag` and `name_or_dir`, or with the bad file.
    """
    name = str(name_or_dir)
    directory = Path(name)
    # Paths are ruled out first, because transformers waits long for the Hub.
    is_path = (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or ("/" in name and os.path.isdir(directory.parent))
    )
    is_directory = os.path.isdir(directory)  # False also for a name that is too long
    if not is_directory and (is_path or os.path.exists(directory)):
        raise InputError(
            f"{flag} {name}: no such directory; "
            "expected a directory with tokenizer.json, or a name on the Hub"
        )
    from transformers import AutoTokenizer

    local = (
        {"config": _build_class_config(directory, flag), "local_files_only": True}
        if is_directory
        else {}
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **local)
    except BaseException as error:
        # OSError, KeyError, JSON and HTTP errors, panics of Rust and more.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if is_directory and not (directory / "tokenizer.json").exists():
            raise InputError(
                f"{flag} {name}: the directory holds no tokenizer.json; "
                "expected a Hugging Face fast tokenizer"
            ) from None
        problem = (
            "tokenizer.json cannot be loaded"
            if is_directory
            else "neither an existing directory nor a tokenizer on the Hub"
        )
        reason = first_error_line(error, 160)
        raise InputError(
            f"{flag} {name}: {problem}; expected a Hugging Face fast tokenizer ({reason})"
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"{flag} {name}: a slow tokenizer ({type(tokenizer).__name__}); "
            "expected one with tokenizer.json"
        )
    return tokenizer


def _build_class_config(directory: Path, flag: str) -> Any:
    """Build the model config from which transformers chooses the tokenizer's class.

    It has only the relevant fields of config.json.

    Raises:
        InputError: A file in the directory could block or leads to another directory.
    """
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        files = sorted(file for file in directory.iterdir() if file.suffix in _TEXT_SUFFIXES)
    except OSError as error:
        raise InputError(
            f"{flag} {directory}: {error.strerror}; expected a directory that can be read"
        ) from None
    for file in files:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise InputError(
                f"{file}: not a regular file; expected one of a Hugging Face tokenizer"
            )

    def read_if_present(name: str) -> dict[str, Any]:
        if not (directory / name).exists():
            return {}
        return read_json_object(directory / name, "an object as transformers writes it")

    values = read_if_present("config.json")
    versions = read_if_present("tokenizer_config.json").get("fast_tokenizer_files", [])
    if not isinstance(versions, list) or any(
        not isinstance(file, str) or Path(file).name != file for file in versions
    ):
        raise InputError(
            f"{directory / 'tokenizer_config.json'}: field `fast_tokenizer_files`: "
            "expected names of files next to it"
        )
    model_type = values.get("model_type")
    if model_type == "mistral" and "layer_types" in values:  # as in transformers' AutoConfig
        model_type = "ministral"
    config = PreTrainedConfig()
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        with contextlib.suppress(Exception):  # two image models have no default config
            config = CONFIG_MAPPING[model_type]()
    config.name_or_path = str(directory)
    for name in ("tokenizer_class", "model_name"):
        if isinstance(values.get(name), str):
            setattr(config, name, values[name])
    if isinstance(model_type, str):
        config.model_type = model_type
    return config


def read_vocabulary(tokenizer: "PreTrainedTokenizerFast") -> Vocabulary:
    """Return a new Vocabulary of a tokenizer.

    Code that uses the Vocabulary does not need transformers. It keeps `tokenizer`, and computes
    `word_codes` and `text_fingerprint` from it when they are first read, so that later changes of
    the tokenizer count for these, but not for the other fields.
    """
    ids = tokenizer.get_vocab().values()
    special = {token for token in tokenizer.all_special_ids if token is not None}
    special |= {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    size = max(len(tokenizer), max(ids, default=-1) + 1)
    return Vocabulary(
        size=size,
        eos_id=tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id,
        mask_id=tokenizer.mask_token_id,
        special_ids=tuple(sorted(special)),
        fingerprint=_compute_fingerprint(tokenizer),
        code_words=partial(compute_word_codes, tokenizer.backend_tokenizer, size),
        hash_text_rules=partial(_compute_fingerprint, tokenizer, with_template=False),
    )


def get_encoder(tokenizer: "PreTrainedTokenizerFast") -> FastEncoder:
    """Return the FastEncoder of a tokenizer, which adds no special tokens.

    Building one takes time; the last four are cached by the tokenizer's JSON, so that a changed
    tokenizer gets another one.
    """
    return _encoder(tokenizer.backend_tokenizer.to_str())


_encoder = lru_cache(maxsize=4)(FastEncoder)


def encode_documents(
    tokenizer: "PreTrainedTokenizerFast", texts: Sequence[str]
) -> list[np.ndarray]:
    """Return the ids of each text as uint32[tokens], in order.

    No token is added or cut off, special tokens spelled in a text are text, and unpaired surrogates
    become U+FFFD.
    """
    return get_encoder(tokenizer)(texts)


def decode_in_spans(
    tokenizer: "PreTrainedTokenizerFast", ids: Sequence[int]
) -> list[tuple[int, str]]:
    """Return (token count, text) of the shortest spans of `ids` of whole characters.

    A character may take several tokens; one whose tokens are incomplete becomes U+FFFD. The spans
    are consecutive, and their concatenated texts are the text of all ids, special tokens included.
    The list is empty without ids. It takes quadratic time.
    """
    decode = tokenizer.backend_tokenizer.decode
    ids = [int(token) for token in ids]
    full_text = decode(ids, skip_special_tokens=False)
    # A position is between two characters if the text decoded up to it is a prefix of the whole.
    cuts = []
    shortest = len(full_text)
    for end in range(len(ids), 0, -1):
        text = decode(ids[:end], skip_special_tokens=False)
        if len(text) <= shortest and full_text.startswith(text):
            cuts.append((end, len(text)))
            shortest = len(text)
    spans = []
    token_count = 0
    text_length = 0
    for end, length in reversed(cuts):
        if length > text_length or not spans:
            spans.append((end - token_count, full_text[text_length:length]))
        else:  # these tokens add no text
            spans[-1] = (spans[-1][0] + end - token_count, spans[-1][1])
        token_count = end
        text_length = length
    return spans


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train and return a byte-level BPE tokenizer of at most `vocab_size` ids.

    The same `texts` give the same one. `<|eos|>` (id 0) is for the end of documents and padding,
    `<|mask|>` (id 1) hides a token with the space before it; neither is added to a text. Encoding
    and decoding preserve any text, except spaces before `<|mask|>`. Small corpora may give fewer
    ids. Words are cut at MAX_WORD_BYTES (1000), only for training. An exception of a signal
    handler, such as KeyboardInterrupt, ends the training within about a second and is raised.

    Args:
        texts: Documents, read once.
        vocab_size: At least MIN_VOCABULARY (258), which is not checked: lower values give as many.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    # Words include the space before them, so the mask token absorbs it:
    # "The <|mask|> sat" hides " cat".
    mask = AddedToken(MASK, lstrip=True, normalized=False, special=True)
    eos = AddedToken(EOS, normalized=False, special=True)
    backend = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.Split(Regex(f".{{{MAX_WORD_BYTES}}}"), "isolated")]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[eos, mask],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _train_interruptibly(backend, trainer, texts)
    backend.pre_tokenizer = words
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        pad_token=eos,
        mask_token=mask,
        model_max_length=MAX_TEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _train_interruptibly(backend: "Tokenizer", trainer: "BpeTrainer", texts: Iterable[str]) -> None:
    """Train `backend` in a thread, so that signals can end the training.

    Signal handlers run only between Python's own steps in the main thread.
    """
    errors: list[BaseException] = []
    stop = threading.Event()

    def read() -> Iterator[str]:
        for text in texts:
            if stop.is_set():
                raise KeyboardInterrupt
            yield replace_surrogates(text)

    def run() -> None:
        try:
            backend.train_from_iterator(read(), trainer)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        stop.set()
        thread.join(_STOP_SECONDS)  # only merging cannot be stopped, and ends with the process
        raise
    if errors:
        raise errors[0]


def _compute_fingerprint(tokenizer: "PreTrainedTokenizerFast", with_template: bool = True) -> str:
    """Compute the sha256 of everything in a tokenizer that decides ids.

    Args:
        with_template: Include the ids that the template puts around a text.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    del backend["padding"], backend["truncation"]
    if not with_template:
        kept = drop_template(backend["post_processor"])
        backend["post_processor"] = kept[0] if kept else _EMPTY_TEMPLATE
    backend["added_tokens"].sort(key=lambda token: token["id"])
    roles = {}
    for role in _ROLES:
        token = getattr(tokenizer, role)
        roles[role] = None if token is None else str(token)
    canonical = json.dumps(
        {"backend": backend, "roles": roles}, sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
