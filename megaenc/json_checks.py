"""Declarative checks of JSON that the product itself writes.

One type describes each kind of object, and pydantic checks it.
"""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megaenc.console import truncate_text
from megaenc.errors import InputError

T = TypeVar("T")

JSON_OBJECT = ConfigDict(strict=True, extra="allow")
"""Configuration of a TypedDict: values have the JSON type of their field, and other fields are kept
as they are."""

Text = Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]
"""Text in one line, without control characters."""
Number = Annotated[float, Field(ge=-1e100, le=1e100, allow_inf_nan=False)]
"""Number whose sums and squares are finite."""
Amount = Annotated[float, Field(ge=0, le=1e100, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]

_EXPECTED = {"dict_type": "an object", "string_pattern_mismatch": "text in one line"}
"""Own words for some types of pydantic's errors."""


def check_json(kind: TypeAdapter[T], values: Any, place: str | Path, advice: str) -> T:
    """Return a copy of `values` as validated by pydantic to be of `kind`.

    Args:
        kind: TypeAdapter of a type, whose configuration decides on conversions: a TypedDict with
            JSON_OBJECT keeps further fields, and converts nothing but an int for a float.
        values: Value of a JSON text.
        place: File or other place, the beginning of errors.
        advice: End of errors: the next step of the user.

    Raises:
        InputError: A field differs; the message names the first one, its value, what is expected,
            and `advice`.
    """
    try:
        return kind.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] == "missing":
        raise InputError(f"{place}: no field `{field}`; {advice}")
    where = f"{place}: field `{field}`" if field else place
    actual = truncate_text(repr(first["input"]), 40)
    expected = _EXPECTED.get(first["type"]) or first["msg"].removeprefix("Input should be ")
    if first["type"].startswith(("greater_than", "less_than")):
        expected = f"a number {truncate_text(expected, 40)}"
    raise InputError(f"{where}: found {actual}, expected {expected}; {advice}")
