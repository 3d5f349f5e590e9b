"""Reading and writing of Hugging Face tokenizers without a change of ids.

tokenizer.json determines the ids. But many of transformers' classes (LlamaTokenizer,
Qwen2Tokenizer) only read its vocabulary and rebuild the rest; tokenizer_config.json, or for some
config.json, names the class. So files are read and written with the class that uses tokenizer.json
unchanged, and exported tokenizers are loaded and compared.
"""

import contextlib
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaenc.data.tokenizer.fast_encode import PROBES
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.tokenizer import MASK, encode_documents, load_tokenizer, read_vocabulary
from megaenc.errors import InputError
from megaenc.json_files import read_json_object

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template*")
_GENERIC_CLASS = "PreTrainedTokenizerFast"  # also known to versions before 5
_GENERIC_CLASSES = (_GENERIC_CLASS, "TokenizersBackend", None)
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens", "post_processor")
# Names of tokens that no text contains and no training used. <|fim_pad|>, <|im_start|> and the like
# are used.
_RESERVED_TOKEN = re.compile(
    r"<\|?mask\|?>|\[MASK\]"  # a mask token without its role
    r"|[<\[]\|?(reserved_special_token|reserved_token|reserved|unused|extra|dummy|placeholder"
    r"|control|SPECIAL)_?\d+\|?[>\]]",
    re.IGNORECASE,
)


def read_tokenizer(directory: Path, rows: int) -> Any:
    """Return transformers' tokenizer of a Hugging Face directory.

    The class is PreTrainedTokenizerFast, whatever the directory names; code there is not run.

    Args:
        directory: Directory with a tokenizer.json.
        rows: Rows of the model's embedding; every id must be below it.

    Raises:
        InputError: The tokenizer is missing or damaged, or has an id of `rows` or more.
    """
    if not (directory / FILE).is_file():
        raise InputError(
            f"--input {directory}: the directory holds no {FILE}; expected a Hugging Face fast "
            "tokenizer"
        )
    config = read_json_object(directory / CONFIG) if (directory / CONFIG).exists() else {}
    config.pop("auto_map", None)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)  # without config.json, which can name a class too
        for file in {
            directory / FILE,
            *(file for pattern in _EXTRA_FILES for file in directory.glob(pattern)),
        }:
            if file.is_file():
                shutil.copy(file, copy)
        try:
            tokenizer = _load_with_config(copy, config | {"tokenizer_class": _GENERIC_CLASS})
        except InputError as error:
            raise InputError(str(error).replace(str(copy), str(directory))) from None
        named = None
        if config.get("tokenizer_class") not in _GENERIC_CLASSES:
            with contextlib.suppress(InputError):
                named = _load_with_config(copy, config)
    ids = read_vocabulary(tokenizer).size
    if named is None and ids <= rows:
        return tokenizer
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(directory / FILE)).get_vocab(with_added_tokens=True)
    # Some classes define roles that the files lack: GPT-2's ends a text with <|endoftext|>.
    for role in ROLES:
        token = getattr(named, role, None)
        if getattr(tokenizer, role) is None and token in known:
            setattr(tokenizer, role, token)
    if ids > rows:
        _raise_too_many_ids(directory, tokenizer, known, rows, ids)
    return tokenizer


def _load_with_config(directory: Path, config: dict[str, Any]) -> Any:
    """Write `config` as `directory`'s tokenizer_config.json and load the tokenizer."""
    (directory / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(directory, "--input")


def _raise_too_many_ids(
    directory: Path, tokenizer: Any, known: dict[str, int], rows: int, ids: int
) -> None:
    """Raise InputError for a tokenizer with more `ids` than the model has `rows`.

    The message names the token that is the cause, if it is known.
    """
    for role in ROLES:  # transformers adds an id for a token with a role that has none
        token = getattr(tokenizer, role)
        if token is not None and token not in known:
            raise InputError(
                f"{directory / CONFIG}: field `{role}`: found {token!r}, expected a token of "
                f"{FILE}: the model's {rows} rows leave none for another"
            )
    raise InputError(
        f"{directory / 'config.json'}: field `vocab_size`: found {rows}, "
        f"expected at least the tokenizer's {ids} ids"
    )


@dataclass(frozen=True)
class MaskToken:
    """Mask token of a tokenizer, and where it comes from.

    Args:
        token: Text of the token.
        id: Id of the token, which is its row of the embedding.
        origin: own: the tokenizer's mask token; reserved: an unused token of its vocabulary, with
            the model's embedding row; untrained: the same with the mean of the other rows; added: a
            new token with the mean of the other rows.
    """

    token: str
    id: int
    origin: Literal["own", "reserved", "untrained", "added"]

    def describe(self) -> str:
        """Return text, id and origin, such as `mask token <mask> (id 4), its own`."""
        description = {"own": "its own", "added": "a new token"}.get(
            self.origin, "a reserved token of its vocabulary"
        )
        row = (
            "; its row was untrained and is now the mean of the others"
            if self.origin == "untrained"
            else ""
        )
        return f"mask token {self.token} (id {self.id}), {description}{row}"


def ensure_mask_token(tokenizer: Any, add: bool) -> MaskToken:
    """Return the mask token of `tokenizer`; give the role to a token if none has it.

    `tokenizer`, transformers', is then changed. `origin` is own, reserved or added.

    Args:
        add: Add `<|mask|>`; False: take a reserved token of the vocabulary, such as `<unused0>`.

    Raises:
        InputError: There is neither a mask token nor a reserved one; or `add`, and there is a mask
            token, or `<|mask|>` without the role.
    """
    if tokenizer.mask_token is not None:
        if add:
            raise InputError(
                f"--add-mask-token: the tokenizer has a mask token, {tokenizer.mask_token}; "
                "leave the flag out"
            )
        return MaskToken(str(tokenizer.mask_token), tokenizer.mask_token_id, "own")
    token = MASK if add else _find_reserved_token(tokenizer)
    if token is None:
        raise InputError(
            "--input: its tokenizer has neither a mask token nor a reserved one; "
            f"give --add-mask-token to add {MASK}, with the mean of the other rows as its row"
        )
    if add and token in tokenizer.get_vocab():
        raise InputError(
            f"--add-mask-token: the tokenizer has a token {MASK} without the role; "
            "leave the flag out"
        )
    from tokenizers import AddedToken

    # Words of most vocabularies include the preceding space, so that the mask token absorbs it
    # (lstrip).
    tokenizer.add_special_tokens(
        {"mask_token": AddedToken(token, lstrip=True, normalized=False, special=True)}
    )
    return MaskToken(token, tokenizer.mask_token_id, "added" if add else "reserved")


def _find_reserved_token(tokenizer: Any) -> str | None:
    """Return the reserved token without a role that has the lowest id, or None.

    One that is called mask is preferred.
    """
    roles = {str(token) for role in ROLES if (token := getattr(tokenizer, role)) is not None}
    tokens = {
        token: id
        for token, id in tokenizer.get_vocab().items()
        if _RESERVED_TOKEN.fullmatch(token) and token not in roles
    }
    return min(tokens, key=lambda token: ("mask" not in token.lower(), tokens[token]), default=None)


def write_tokenizer(tokenizer: Any, directory: Path, **options: Any) -> None:
    """Write tokenizer.json, tokenizer_config.json and a chat template to `directory`.

    The config names the class that uses tokenizer.json unchanged, PreTrainedTokenizerFast. Existing
    files are replaced, a missing directory is created.

    Args:
        tokenizer: Transformers' tokenizer.
        options: Fields of tokenizer_config.json to add or replace.
    """
    tokenizer.save_pretrained(directory)
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    # The first two are options of loading. With the others transformers replaces the template of
    # tokenizer.json.
    for name in ("is_local", "local_files_only", "add_bos_token", "add_eos_token"):
        config.pop(name, None)
    for role in ROLES:
        token = getattr(tokenizer, role)
        config[role] = None if token is None else str(token)
    config |= {"tokenizer_class": _GENERIC_CLASS, **options}
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def drop_incompatible_mask_role(model_type: str, tokenizer: Any) -> None:
    """Remove the mask role from `tokenizer` if transformers would change the token.

    If the `model_type` is qwen2, transformers loads any tokenizer as Qwen2Tokenizer, which
    recreates tokens with roles without their flags (lstrip, rstrip, single_word, normalized). A
    mask token with any of these, or that is no added token, loses its role; the token itself stays.

    Args:
        model_type: Field `model_type` of the config.json.
        tokenizer: Transformers' tokenizer, changed in place.
    """
    if model_type == "qwen2" and tokenizer.mask_token is not None:
        mask = tokenizer.added_tokens_decoder.get(tokenizer.mask_token_id)
        if mask is None or mask.lstrip or mask.rstrip or mask.single_word or mask.normalized:
            tokenizer.mask_token = None


def verify_tokenizer(
    directory: Path, trained: Any, model_type: str, special_tokens: SpecialTokens | None = None
) -> dict[str, Any]:
    """Check that the tokenizer of an export encodes as the one of training.

    It compares the ids of fixed texts, which include every special token, the text decoded from
    them, the roles, and the pipeline parts that determine ids. It returns the results for
    conversion.json (`class`, `mask_token`, `texts`, `same`); the first difference is an InputError.

    Args:
        directory: Directory of the export, which transformers loads.
        trained: Transformers' tokenizer of training.
        model_type: Field `model_type` of the export's config.json, for errors.
        special_tokens: Those with which the export must surround a text; None: not compared.
    """
    loaded = load_tokenizer(directory)
    kind = type(loaded).__name__
    texts = [*PROBES, *(f" {text}" for text in PROBES)]
    for token in trained.added_tokens_decoder.values():
        texts += [f"The {token} quick {token}{token}.", f"{token} x"]
    prefix = (
        f"the tokenizer that transformers loads with a {model_type} config.json, {kind}, "
        "is not the run's: "
    )
    for text, corpus in zip(texts, encode_documents(trained, texts), strict=True):
        ids = trained(text)["input_ids"]
        pairs = [
            (
                loaded(text, add_special_tokens=False, split_special_tokens=True)["input_ids"],
                corpus.tolist(),
            ),
            (loaded(text)["input_ids"], ids),
        ]
        if special_tokens is not None:
            document = special_tokens.surround(corpus).tolist()
            pairs.append((loaded(text, split_special_tokens=True)["input_ids"], document))
        for actual, expected in pairs:
            if actual != expected:
                pairs_of_ids = enumerate(zip(actual, expected, strict=False))
                same = next(
                    (
                        place
                        for place, (actual_id, expected_id) in pairs_of_ids
                        if actual_id != expected_id
                    ),
                    min(len(actual), len(expected)),
                )
                start = max(0, same - 2)
                actual = " ".join(map(str, actual[start : start + 12]))
                expected = " ".join(map(str, expected[start : start + 12]))
                raise InputError(
                    f"{prefix}{text[:60]!r} is encoded as .. {actual}, expected .. {expected}"
                )
        if loaded.decode(ids) != trained.decode(ids):
            raise InputError(f"{prefix}the ids of {text[:60]!r} are decoded to another text")
    for role in ROLES:
        if getattr(loaded, role) != getattr(trained, role):
            raise InputError(
                f"{prefix}`{role}` is {getattr(loaded, role)!r}, "
                f"expected {getattr(trained, role)!r}"
            )
    actual = _read_pipeline(loaded)
    expected = _read_pipeline(trained)
    for part in _PARTS:
        if actual[part] != expected[part]:
            raise InputError(f"{prefix}`{part}` differs")
    same = ["ids", "text of the ids", "roles", *_PARTS]
    return {"class": kind, "mask_token": loaded.mask_token, "texts": len(texts), "same": same}


def _read_pipeline(tokenizer: Any) -> dict[str, Any]:
    """Return the parts of a tokenizer's pipeline that determine ids.

    They are in a canonical form: without offsets, and with None for empty affixes.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    parts["added_tokens"].sort(key=lambda token: token["id"])
    parts["model"] |= {
        name: parts["model"].get(name) or None
        for name in ("continuing_subword_prefix", "end_of_word_suffix")
    }
    offsets = {part: _drop_offsets(parts[part]) for part in ("pre_tokenizer", "post_processor")}
    return {part: parts[part] for part in _PARTS} | offsets


def _drop_offsets(part: Any) -> Any:
    """Return a pipeline part without its options `trim_offsets`."""
    if isinstance(part, dict):
        return {
            name: _drop_offsets(value) for name, value in part.items() if name != "trim_offsets"
        }
    return [_drop_offsets(value) for value in part] if isinstance(part, list) else part
