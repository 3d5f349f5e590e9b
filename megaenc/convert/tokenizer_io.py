"""A tokenizer on its way in and out: a text has the same ids in training, in the run folder and in every export.

What decides ids is tokenizer.json. But many of transformers' classes (LlamaTokenizer, Qwen2Tokenizer) take nothing but the
vocabulary from it and build everything else as they see fit; tokenizer_config.json names the class, and beside some a config.json
does. So files are read and written under the class that takes tokenizer.json as it is, and an export's are loaded and compared.
"""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaenc.data.tokenizer.fast_encode import PROBES
from megaenc.data.tokenizer.tokenizer import MASK, encode_documents, load_tokenizer, read_vocabulary
from megaenc.errors import InputError
from megaenc.json_files import read_json_object

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA_FILES = ("special_tokens_map.json", "added_tokens.json", "chat_template*")
_GENERIC_CLASS = "PreTrainedTokenizerFast"  # the name that versions before 5 know too
_GENERIC_CLASSES = (_GENERIC_CLASS, "TokenizersBackend", None)
_PARTS = ("normalizer", "pre_tokenizer", "model", "added_tokens", "post_processor")
# What tokenizers call tokens that no text contains and no training used. Those that only look so are not here: <|fim_pad|>,
# <|im_start|> and their like have a use.
_RESERVED_TOKEN = re.compile(
    r"<\|?mask\|?>|\[MASK\]"  # a mask token whose role was never set
    r"|[<\[]\|?(reserved_special_token|reserved_token|reserved|unused|extra|dummy|placeholder|control|SPECIAL)_?\d+\|?[>\]]",
    re.IGNORECASE,
)


def read_tokenizer(folder: Path, rows: int) -> Any:
    """The tokenizer of a Hugging Face folder, whose ids are those of its tokenizer.json; code that it names is not run.

    `rows`: of the model's embedding. InputError if there is none or it has more ids than that.
    """
    if not (folder / FILE).is_file():
        raise InputError(f"--input {folder}: the folder holds no {FILE}; expected a Hugging Face fast tokenizer")
    config = read_json_object(folder / CONFIG) if (folder / CONFIG).exists() else {}
    config.pop("auto_map", None)
    with tempfile.TemporaryDirectory() as name:
        alone = Path(name)  # beside no config.json, which can name a class as well
        for file in {folder / FILE, *(file for pattern in _EXTRA_FILES for file in folder.glob(pattern))}:
            if file.is_file():
                shutil.copy(file, alone)
        try:
            tokenizer = _load_with_config(alone, config | {"tokenizer_class": _GENERIC_CLASS})
        except InputError as error:
            raise InputError(str(error).replace("--tokenizer", "--input").replace(str(alone), str(folder))) from None
        named = None
        if config.get("tokenizer_class") not in _GENERIC_CLASSES:
            with contextlib.suppress(InputError):
                named = _load_with_config(alone, config)
    ids = read_vocabulary(tokenizer).size
    if named is None and ids <= rows:
        return tokenizer
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(folder / FILE)).get_vocab(with_added_tokens=True)
    for role in ROLES:  # some classes know what the files do not say: GPT-2's ends a text with <|endoftext|>
        token = getattr(named, role, None)
        if getattr(tokenizer, role) is None and token in known:
            setattr(tokenizer, role, token)
    if ids > rows:
        _raise_too_many_ids(folder, tokenizer, known, rows, ids)
    return tokenizer


def _load_with_config(alone: Path, config: dict[str, Any]) -> Any:
    (alone / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(alone)


def _raise_too_many_ids(folder: Path, tokenizer: Any, known: dict[str, int], rows: int, ids: int) -> None:
    for role in ROLES:  # transformers gives an id to a token with a role that has none
        token = getattr(tokenizer, role)
        if token is not None and token not in known:
            raise InputError(
                f"{folder / CONFIG}: field `{role}`: found {token!r}, expected a token of {FILE}: the model's {rows} rows "
                "leave none for another"
            )
    raise InputError(f"{folder / 'config.json'}: field `vocab_size`: found {rows}, expected at least the tokenizer's {ids} ids")


@dataclass(frozen=True)
class MaskToken:
    """Which token hides others, and where it comes from."""

    token: str
    id: int
    # The tokenizer's mask token; an unused token of its vocabulary, with the row that the model has or, if no training touched
    # that, the mean of the others, as has a new one.
    origin: Literal["own", "reserved", "untrained", "added"]

    def describe(self) -> str:
        """Return it for the console."""
        what = {"own": "its own", "added": "a new token"}.get(self.origin, "a reserved token of its vocabulary")
        row = "; its row was untrained and is now the mean of the others" if self.origin == "untrained" else ""
        return f"mask token {self.token} (id {self.id}), {what}{row}"


def ensure_mask_token(tokenizer: Any, add: bool) -> MaskToken:
    """Make sure that `tokenizer`, which is changed, has a mask token: its own, else one that is reserved, or (`add`) a new one.

    InputError where it has none and none is to be added, or `add` asks for one that is there.
    """
    if tokenizer.mask_token is not None:
        if add:
            raise InputError(f"--add-mask-token: the tokenizer has a mask token, {tokenizer.mask_token}; leave the flag out")
        return MaskToken(str(tokenizer.mask_token), tokenizer.mask_token_id, "own")
    token = MASK if add else _find_reserved_token(tokenizer)
    if token is None:
        raise InputError(
            f"--input: its tokenizer has neither a mask token nor a reserved one; give --add-mask-token to add {MASK}, with "
            "the mean of the other rows as its row"
        )
    if add and token in tokenizer.get_vocab():
        raise InputError(f"--add-mask-token: the tokenizer has a token {MASK} without the role; leave the flag out")
    from tokenizers import AddedToken

    # Words of most vocabularies carry the space before them, so the mask token swallows that space.
    tokenizer.add_special_tokens({"mask_token": AddedToken(token, lstrip=True, normalized=False, special=True)})
    return MaskToken(token, tokenizer.mask_token_id, "added" if add else "reserved")


def _find_reserved_token(tokenizer: Any) -> str | None:
    """Return the unused token with the lowest id that has no role, one that is called a mask before others."""
    roles = {str(token) for role in ROLES if (token := getattr(tokenizer, role)) is not None}
    found = {token: id for token, id in tokenizer.get_vocab().items() if _RESERVED_TOKEN.fullmatch(token) and token not in roles}
    return min(found, key=lambda token: ("mask" not in token.lower(), found[token]), default=None)


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write its files into `folder`, to be loaded as they are: each role is named, so that no class fills it as it likes."""
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for name in ("is_local", "local_files_only"):  # how it was loaded here
        config.pop(name, None)
    config |= {role: None if (token := getattr(tokenizer, role)) is None else str(token) for role in ROLES}
    config["tokenizer_class"] = _GENERIC_CLASS
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def drop_incompatible_mask_role(model_type: str, tokenizer: Any) -> None:
    """Change `tokenizer` to one that comes back from a folder whose config.json is of `model_type`.

    Beside Qwen2's transformers loads any tokenizer as Qwen2Tokenizer, which sets each token with a role up anew and forgets that
    it takes the space before it. So a mask token that takes it has no role there; it stays the token that it is.
    """
    if model_type == "qwen2" and tokenizer.mask_token is not None:
        mask = tokenizer.added_tokens_decoder.get(tokenizer.mask_token_id)
        if mask is None or mask.lstrip or mask.rstrip or mask.single_word or mask.normalized:
            tokenizer.mask_token = None


def verify_tokenizer(folder: Path, trained: Any, model_type: str) -> dict[str, Any]:
    """Load the tokenizer in the export `folder` as its users do and compare it with `trained`; returns what conversion.json says.

    Compared are the ids of fixed texts, those with every special token spelled out among them, and the parts of the pipeline that
    decide the ids of any text. InputError names the first difference.
    """
    loaded = load_tokenizer(folder)
    kind, texts = type(loaded).__name__, list(_probe_texts(trained))
    who = f"the tokenizer that transformers loads beside a {model_type} config.json, {kind}, is not the run's: "
    for text, corpus in zip(texts, encode_documents(trained, texts), strict=True):
        ids = trained(text)["input_ids"]
        pairs = (
            (loaded(text, add_special_tokens=False, split_special_tokens=True)["input_ids"], corpus.tolist()),
            (loaded(text)["input_ids"], ids),
        )
        for here, there in pairs:
            if here != there:
                found, expected = (" ".join(map(str, row[:12])) for row in _trim_common_ids(here, there))
                raise InputError(f"{who}of {text[:60]!r} it makes ids .. {found}, expected .. {expected}")
        if loaded.decode(ids) != trained.decode(ids):
            raise InputError(f"{who}of the ids of {text[:60]!r} it makes another text")
    for role in ROLES:
        if getattr(loaded, role) != getattr(trained, role):
            raise InputError(f"{who}`{role}` is {getattr(loaded, role)!r}, expected {getattr(trained, role)!r}")
    here, there = _read_pipeline(loaded), _read_pipeline(trained)
    for part in _PARTS:
        if here[part] != there[part]:
            raise InputError(f"{who}`{part}` differs")
    same = ["ids", "text of the ids", "roles", *_PARTS]
    return {"class": kind, "mask_token": loaded.mask_token, "texts": len(texts), "same": same}


def _probe_texts(tokenizer: Any) -> Iterator[str]:
    yield from PROBES
    yield from (f" {text}" for text in PROBES)
    for token in tokenizer.added_tokens_decoder.values():
        yield f"The {token} quick {token}{token}."
        yield f"{token} x"


def _trim_common_ids(here: list[int], there: list[int]) -> tuple[list[int], list[int]]:
    """Both from two ids before the first in which they differ."""
    same = next((at for at, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), min(len(here), len(there)))
    return here[max(0, same - 2) :], there[max(0, same - 2) :]


def _read_pipeline(tokenizer: Any) -> dict[str, Any]:
    """What decides ids, in one way of writing it: offsets decide none, and an affix that is empty is none."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    parts["added_tokens"].sort(key=lambda token: token["id"])
    parts["model"] |= {name: parts["model"].get(name) or None for name in ("continuing_subword_prefix", "end_of_word_suffix")}
    offsets = {part: _drop_offsets(parts[part]) for part in ("pre_tokenizer", "post_processor")}
    return {part: parts[part] for part in _PARTS} | offsets


def _drop_offsets(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _drop_offsets(value) for name, value in part.items() if name != "trim_offsets"}
    return [_drop_offsets(value) for value in part] if isinstance(part, list) else part
