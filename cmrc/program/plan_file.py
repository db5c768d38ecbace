"""Plan files: `plan.json` contains what a person wants to read, and a file beside it the large arrays.

Arrays of more than `INLINE` numbers are stored in a safetensors file that is named by its content, so a plan is never
half-written and never needs pickle. plan.json is renamed last; then array files that only the previous plan used are
removed. A plan file may come from a stranger: it is read strictly, its arrays only from its own folder, and only if
their content matches their name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from cmrc.errors import PlanError
from cmrc.files import is_mentioned, locked, publish, require_writable, staging, target, writing
from cmrc.ir.fingerprint import Fingerprint
from cmrc.ir.graph import Array, Do
from cmrc.program.plan_entry import INLINE, Pack, entry_from_json, entry_to_json, shape_of, unpack_lists
from cmrc.strict_json import parse_json

FORMAT = "cmrc-plan-1"
LARGEST_FILE = 256 << 20  # the largest plan.json in bytes; its arrays are stored elsewhere
CHUNK = 1 << 20
WRITTEN = "give a file that `Plan.save` wrote"
BESIDE = "keep that file beside the plan, unchanged"


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a plan file."""

    entries: list[Do]
    fingerprint: Fingerprint | None = None
    made: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Array] = field(default_factory=dict)


# ---------------------------------------------------------------- writing


def write_plan(path: Path, contents: Contents, *, one_file: bool = False) -> None:
    """Write `path` (JSON), and a safetensors file beside it if there are large arrays. Both are written completely or not at all.

    With `one_file` every array is written as text: longer, and for a stream.
    """
    require_writable(path)
    path = target(path)
    large: dict[str, Array] = {}

    def pack(name: str, array: Array) -> Any:
        finite = np.isfinite(array).all()  # JSON has no infinity
        if finite and (one_file or array.size <= INLINE):
            return array.tolist()
        if one_file:
            raise PlanError(
                f"{name} is not finite, and a plan in a single JSON file cannot hold that",
                fix="save the plan to a file",
            )
        large[name] = np.ascontiguousarray(array, dtype=np.float64)
        return {"tensor": name, "shape": list(array.shape)}

    def packer(place: str) -> Pack:
        return lambda name, array: pack(f"{place}.{name}", array)

    dos = [entry_to_json(entry, packer(f"do[{i}]")) for i, entry in enumerate(contents.entries)]
    document: dict[str, Any] = {"format": FORMAT}
    if contents.fingerprint is not None:
        document["model"] = contents.fingerprint.to_json()
    if contents.made:
        document["made"] = contents.made
    if contents.scores:
        document["scores"] = {site: pack(f"scores[{site}]", array) for site, array in contents.scores.items()}
    data = save(large) if large else b""
    name = f"{path.stem}.{_digest(data)}.safetensors"
    if large:
        document["tensors"] = name
    document["do"] = dos
    try:
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(
            f"`made` cannot be written as JSON: {error}", at=str(path), fix="keep finite numbers, text and lists in it"
        ) from error
    with writing(path), staging(path.parent) as folder:
        staged, arrays = folder / path.name, folder / name
        staged.write_bytes(text.encode())
        if large:
            arrays.write_bytes(data)
        with locked(path.parent):
            if large:
                publish(arrays, path.parent / name)
            publish(staged, path)
            _remove_unused(path)


def _remove_unused(path: Path) -> None:
    """Remove array files of earlier plans of this name, and of a save that was killed: nothing refers to them any more."""
    pattern = re.compile(re.escape(path.stem) + r"\.[0-9a-f]{12}\.safetensors")
    for file in [file for file in path.parent.iterdir() if pattern.fullmatch(file.name)]:
        with contextlib.suppress(OSError):  # the plan is saved: a leftover file is no reason to fail
            if file.is_file() and not file.is_symlink() and not is_mentioned(file):
                file.unlink()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


# ---------------------------------------------------------------- reading


def read_plan(path: Path) -> Contents:
    """A plan that is consistent by itself, or a PlanError with the entry, the reason and the fix."""
    from cmrc.program import plan_schema  # imported here: only reading needs pydantic, which is slow to load

    document = _read_document(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError(f"is not a plan of format {FORMAT}", at=str(path), fix=WRITTEN)
    record = plan_schema.validated(plan_schema.PlanRecord, document, what="the plan", at=str(path))
    tensors = {} if record.tensors is None else _read_tensors(path, record.tensors)

    def unpack(packed: Any) -> Array:
        return _take(tensors, packed) if isinstance(packed, dict) else unpack_lists(packed)

    entries = [entry_from_json(entry, unpack, f"{path.name}: do[{i}]") for i, entry in enumerate(record.do)]
    scores = {site: _scores(site, packed, unpack, entries, path) for site, packed in record.scores.items()}
    model = None if record.model is None else Fingerprint.from_json(document["model"])
    return Contents(entries, model, record.made, scores)


def _read_document(path: Path) -> Any:
    data = b""
    try:
        with path.open("rb") as file:
            while len(data) <= LARGEST_FILE and (chunk := file.read(CHUNK)):
                data += chunk
    except OSError as error:
        raise PlanError(
            f"cannot be read: {error.strerror}", at=str(path), fix="give the path of a plan file"
        ) from error
    if len(data) > LARGEST_FILE:
        raise PlanError(f"is larger than {LARGEST_FILE:,} bytes", at=str(path), fix=WRITTEN)
    try:
        return parse_json(data)
    except ValueError as error:
        raise PlanError(f"is not JSON: {error}", at=str(path), fix=WRITTEN) from error


def _read_tensors(path: Path, name: str) -> dict[str, Array]:
    """The arrays beside a plan: from its own folder, and equal to the hash in their name."""
    named = re.fullmatch(r"[^/\\\0]*\.([0-9a-f]{12})\.safetensors", name)
    if named is None:
        raise PlanError(
            f"`tensors` is {name!r}, which is not the name of an array file beside the plan", at=str(path), fix=BESIDE
        )
    folders = [
        path.parent,
        path.resolve().parent,
    ]  # a plan may be a symlink: its arrays are beside the link or beside its target
    beside = next((folder / name for folder in folders if (folder / name).exists()), path.parent / name)
    if beside.is_symlink() and beside.resolve().parent not in [folder.resolve() for folder in folders]:
        raise PlanError(f"its array file {name} is a link to outside the plan's folder", at=str(path), fix=BESIDE)
    try:
        data = beside.read_bytes()
        if _digest(data) != named[1]:
            raise PlanError(f"its array file {name} is not the one that it was saved with", at=str(path), fix=BESIDE)
        return {tensor: _tensor(tensor, parts) for tensor, parts in deserialize(data)}  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlanError(f"its array file {name} cannot be read: {reason}", at=str(path), fix=BESIDE) from error


def _tensor(name: str, parts: Mapping[str, Any]) -> Array:
    if parts["dtype"] != "F64":
        raise ValueError(f"{name} is of type {parts['dtype']}, not F64")
    return np.frombuffer(parts["data"], dtype="<f8").reshape(parts["shape"]).astype(np.float64)


def _take(tensors: Mapping[str, Array], packed: Mapping[str, Any]) -> Array:
    """The array that a reference names: {"tensor": name, "shape": [...]}."""
    if packed.keys() != {"tensor", "shape"} or not isinstance(packed["tensor"], str):
        raise ValueError("an array must have the keys `tensor` and `shape`")
    name, shape = packed["tensor"], shape_of(packed["shape"])
    if name not in tensors:
        raise ValueError(f"the array {name!r} is not in the file beside the plan")
    if tensors[name].shape != shape:
        raise ValueError(f"the array {name!r} has shape {list(tensors[name].shape)}, not {list(shape)}")
    return tensors[name]


def _scores(site: str, packed: Any, unpack: Any, entries: list[Do], path: Path) -> Array:
    """The scores of a site, with a score for every unit that is replaced."""
    try:
        scores: Array = unpack(packed)
        if scores.ndim != 1:
            raise ValueError(f"they have shape {list(scores.shape)}, but one score per unit is needed")
        last = max((max(entry.units) for entry in entries if entry.site == site), default=-1)
        if last >= len(scores):
            raise ValueError(f"there are only {len(scores)}, but unit {last} is replaced")
    except ValueError as error:
        raise PlanError(f"the scores of {site!r} cannot be read: {error}", at=str(path), fix=WRITTEN) from error
    return scores
