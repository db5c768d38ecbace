"""Recipe files: YAML read without executing anything, and errors that name the key, its value and what is allowed.

Two things differ from PyYAML's safe loader: a key may occur only once, and `1e-6` is a number, as YAML 1.2 says.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError

from cmrc.errors import RecipeError

LARGEST = 2**20  # bytes of a file; a recipe is a page of text
FIX = "write a YAML file with lines like `keep: 0.5`"
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxother, _SHORT.maxstring = 2, 60, 60


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """The safe loader, stricter about keys and kinder to numbers."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key occurs twice", node.start_mark)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_recipe(path: Path) -> Mapping[str, Any]:
    """The mapping that a file holds."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise RecipeError(f"the file has more than {LARGEST} bytes", at=str(path), fix=FIX)
        document = yaml.load(data.decode("utf-8"), _Loader)  # a safe loader
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror or error}", at=str(path), fix=FIX) from error
    except UnicodeDecodeError as error:
        raise RecipeError("is not a text file in UTF-8", at=str(path), fix=FIX) from error
    except RecursionError as error:
        raise RecipeError("is nested too deeply", at=str(path), fix=FIX) from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        # PyYAML reports tags that do not fit their value (`!!timestamp x`, `!!int x`) in many ways.
        raise RecipeError(f"is not YAML: {_first_line(error)}", at=str(path), fix=FIX) from error
    if not isinstance(document, dict):
        raise RecipeError("is not a mapping of keys to values", at=str(path), fix=FIX)
    return document


def check_recipe(schema: TypeAdapter[Any], given: Mapping[Any, Any], allowed: Mapping[str, str], where: str) -> Any:
    """The recipe that a mapping describes; `allowed` says for every key what it may be."""
    plain = {key: _plain(value) for key, value in given.items()}
    for key in plain:
        if not isinstance(key, str) or key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, 1)
            fix = f"did you mean {near[0]!r}?" if near else "see docs/planning.md for the keys of a recipe"
            raise RecipeError(f"{_SHORT.repr(key)} is not a key of a recipe", at=where, fix=fix)
    try:
        return schema.validate_python(plain)
    except RecipeError as error:
        raise RecipeError(error.reason, at=error.at or where, fix=error.fix) from None
    except ValidationError as error:
        # Of a union every part is reported: the error that reaches furthest into the value is the one that was meant.
        reported = error.errors(include_url=False, include_context=False)
        first = max(reported, key=lambda each: len(_place(each["loc"], plain)[0]))
        path, value = _place(first["loc"], plain)
        missing = f"{path} has no {first['loc'][-1]!r}"
        wrong = f"{path} is {_SHORT.repr(value)}"
        reason = missing if first["type"] in ("missing", "missing_argument") else wrong
        raise RecipeError(reason, at=where, fix=f"{first['loc'][0]} is {allowed[str(first['loc'][0])]}") from error


def _place(location: tuple[Any, ...], given: Any) -> tuple[str, Any]:
    """The path to the value that is wrong, as far as it exists: pydantic adds the names of types to it."""
    path, value = "", given
    for part in location:
        if isinstance(value, Mapping) and part in value:
            path, value = f"{path}.{part}" if path else str(part), value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
    return path, value


def _plain(value: Any) -> Any:
    """Numpy's numbers as Python's: a schema tells whole numbers from others by their type."""
    if isinstance(value, np.generic):
        return value.item()
    return {key: _plain(part) for key, part in value.items()} if type(value) is dict else value


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
