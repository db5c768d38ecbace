"""The records of a plan file: every key and its type. Anything else is refused, and the error names it."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from cmrc.errors import PlanError

FIX = "compare it with what `Plan.save` writes"

Name = Annotated[str, Field(min_length=1)]
R = TypeVar("R", bound="Record")


class Record(BaseModel):
    """Types are strict: 1.0 and true are not whole numbers. An unknown key is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class AffineRecord(Record):
    parents: Any  # positions and arrays: plan_entry.py reads them
    weight: Any
    bias: Any


class DoRecord(Record):
    site: Name
    value: Name | None = None
    axis: Annotated[int, Field(ge=0, lt=64)]
    units: Any
    constant: Any = None
    affine: AffineRecord | None = None
    basis: Any = None


class ModelRecord(Record):
    scheme: PositiveInt = 1  # plans from before there was a second format do not state it
    digest: str = ""
    structure: str
    ops: dict[str, PositiveInt]
    weights: dict[str, str]


class PlanRecord(Record):
    format: str
    model: ModelRecord | None = None
    made: dict[str, Any] = Field(default_factory=dict)
    scores: dict[str, Any] = Field(default_factory=dict)
    tensors: str | None = None
    do: list[Any] = Field(default_factory=list)


# pydantic's messages in our own words.
PHRASES = {
    "missing": "is missing",
    "extra_forbidden": "is not a known key",
    "int_type": "is not a whole number",
    "string_type": "is not text",
    "string_too_short": "is empty",
    "list_type": "is not a list",
    "dict_type": "is not an object",
    "model_type": "is not an object",
    "greater_than": "is too small",
    "greater_than_equal": "is negative",
    "less_than": "is too large",
}


def validated(record: type[R], document: Any, *, what: str, at: str) -> R:
    """The document as this record, or a PlanError with the first mistake."""
    try:
        return record.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        phrase = PHRASES.get(first["type"], f"is not valid: {first['msg']}")
        given = "" if first["type"] in ("missing", "extra_forbidden") else f": {reprlib.repr(first['input'])}"
        raise PlanError(f"`{where}` {phrase}{given}" if where else f"{what} {phrase}{given}", at=at, fix=FIX) from error
