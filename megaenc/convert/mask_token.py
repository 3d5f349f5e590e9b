"""A mask token for a tokenizer that may come without one."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from megaenc.data.tokenizer import MASK
from megaenc.errors import InputError

# What tokenizers call tokens that no text contains and no training used. Those that only look so are not here: <|fim_pad|>,
# <|im_start|> and their like have a use.
_UNUSED = re.compile(
    r"<\|?mask\|?>|\[MASK\]"  # a mask token whose role was never set
    r"|[<\[]\|?(reserved_special_token|reserved_token|reserved|unused|extra|dummy|placeholder|control|SPECIAL)_?\d+\|?[>\]]",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class MaskToken:
    """Which token hides others, and where it comes from."""

    token: str
    id: int
    origin: Literal["own", "reserved", "untrained", "added"]
    """The tokenizer's mask token; an unused token of its vocabulary, with the row that the model has or, where no training
    touched that, the mean of the others, as has a new one."""

    def describe(self) -> str:
        """For the console."""
        what = {"own": "its own", "added": "a new token"}.get(self.origin, "a reserved token of its vocabulary")
        row = "; its row was untrained and is now the mean of the others" if self.origin == "untrained" else ""
        return f"mask token {self.token} (id {self.id}), {what}{row}"


def give_mask_token(tokenizer: Any, add: bool) -> MaskToken:
    """Make sure that `tokenizer`, which is changed, has a mask token: its own, else one that is reserved, or (`add`) a new one.

    InputError where it has none and none is to be added, or `add` asks for one that is there.
    """
    if tokenizer.mask_token is not None:
        if add:
            raise InputError(f"--add-mask-token: the tokenizer has a mask token, {tokenizer.mask_token}; leave the flag out")
        return MaskToken(str(tokenizer.mask_token), tokenizer.mask_token_id, "own")
    token = MASK if add else _reserved(tokenizer)
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


def _reserved(tokenizer: Any) -> str | None:
    """The unused token with the lowest id that has no role, one that is called a mask before others."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
    roles = {str(token) for name in names if (token := getattr(tokenizer, name)) is not None}
    found = {token: id for token, id in tokenizer.get_vocab().items() if _UNUSED.fullmatch(token) and token not in roles}
    return min(found, key=lambda token: ("mask" not in token.lower(), found[token]), default=None)
