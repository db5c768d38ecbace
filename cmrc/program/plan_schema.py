"""What the records of a plan file look like: every key, and the type of each. Anything else is refused by name."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from cmrc.errors import PlanError

FIX = "compare it with what `Plan.save` writes"

Name = Annotated[str, Field(min_length=1)]
R = TypeVar("R", bound="Record")


class Record(BaseModel):
    """Types are taken by the letter: 1.0 and true are no whole numbers. A key that nobody knows is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class AffineRecord(Record):
    parents: Any  # of positions, and arrays: plan_entry.py reads them
    weight: Any
    bias: Any


class DoRecord(Record):
    site: Name
    value: Name | None = None
    axis: Annotated[int, Field(ge=0, lt=64)]
    units: Any
    constant: Any = None
    affine: AffineRecord | None = None


class ModelRecord(Record):
    scheme: PositiveInt = 1  # plans from before there was a second one do not say it
    digest: str = ""
    structure: str
    ops: dict[str, PositiveInt]
    weights: dict[str, str]


class PlanRecord(Record):
    format: str
    model: ModelRecord | None = None
    made: dict[str, Any] = {}
    scores: dict[str, Any] = {}
    tensors: str | None = None
    do: list[Any] = []


# What pydantic says by its own words, in ours.
PHRASES = {
    "missing": "is missing",
    "extra_forbidden": "is not known here",
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
    """The document as this record, or a PlanError with the first thing that is wrong."""
    try:
        return record.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        phrase = PHRASES.get(first["type"], f"is not valid: {first['msg']}")
        given = "" if first["type"] in ("missing", "extra_forbidden") else f": {reprlib.repr(first['input'])}"
        raise PlanError(f"`{where}` {phrase}{given}" if where else f"{what} {phrase}{given}", at=at, fix=FIX) from error
