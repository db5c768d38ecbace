"""Plan files: `plan.json` holds what a person wants to read, and a file beside it the large arrays.

Arrays of more than `INLINE` numbers lie in a safetensors file that is named by its content, so that a plan is never
half-written and never needs pickle.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from cmrc.errors import PlanError
from cmrc.files import require_writable, write_whole
from cmrc.ir.fingerprint import Fingerprint
from cmrc.ir.graph import Array
from cmrc.program.do import Do

FORMAT = "cmrc-plan-1"
INLINE = 64
Pack = Callable[[str, Array], Any]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a plan file holds."""

    entries: list[Do]
    fingerprint: Fingerprint | None = None
    made: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Array] = field(default_factory=dict)


def write_plan(path: Path, contents: Contents) -> None:
    """Write `path` (JSON), and a safetensors file beside it if there are large arrays. Whole or not at all."""
    require_writable(path)
    large: dict[str, Array] = {}

    def pack(name: str, array: Array) -> Any:
        if array.size <= INLINE:
            return array.tolist()
        large[name] = np.ascontiguousarray(array)
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
    if large:
        data = save(large)
        name = f"{path.stem}.{hashlib.sha256(data).hexdigest()[:12]}.safetensors"
        document["tensors"] = name
        write_whole(path.parent / name, data)
    document["do"] = dos
    write_whole(path, (json.dumps(document, indent=1) + "\n").encode())


def entry_to_json(entry: Do, pack: Pack) -> dict[str, Any]:
    """One do as JSON; `pack` decides how an array is written."""
    document: dict[str, Any] = {
        "site": entry.site,
        "value": entry.value,
        "axis": entry.axis,
        "units": to_ranges(entry.units),
    }
    if entry.weight is None:
        return {**document, "constant": pack("constant", entry.constant)}
    weight, bias = pack("weight", entry.weight), pack("bias", entry.constant)
    return {**document, "affine": {"parents": to_ranges(entry.parents), "weight": weight, "bias": bias}}


def read_plan(path: Path) -> Contents:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise PlanError(
            f"cannot be read: {error.strerror}", at=str(path), fix="give the path of a plan file"
        ) from error
    except ValueError as error:
        raise PlanError(f"is not JSON: {error}", at=str(path), fix="give a file that `Plan.save` wrote") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError(f"is not a plan of format {FORMAT}", at=str(path), fix="give a file that `Plan.save` wrote")
    tensors: dict[str, Array] = {}
    if "tensors" in document:
        beside = path.parent / str(document["tensors"])
        try:
            tensors = load_file(beside)
        except (OSError, SafetensorError) as error:
            raise PlanError(
                f"its arrays in {beside.name} cannot be read: {error}",
                at=str(path),
                fix="keep that file beside the plan, unchanged",
            ) from error

    def unpack(packed: Any) -> Array:
        if isinstance(packed, dict):
            return np.asarray(tensors[packed["tensor"]], dtype=np.float64)
        return np.asarray(packed, dtype=np.float64)

    dos = [entry_from_json(entry, unpack, f"{path.name}: do[{i}]") for i, entry in enumerate(document.get("do", []))]
    model = document.get("model")
    scores = {str(site): unpack(packed) for site, packed in document.get("scores", {}).items()}
    known = Fingerprint.from_json(model) if model else None
    return Contents(dos, known, dict(document.get("made", {})), scores)


def entry_from_json(entry: Any, unpack: Callable[[Any], Array], at: str) -> Do:
    try:
        site, value, axis = str(entry["site"]), str(entry.get("value", entry["site"])), int(entry["axis"])
        units = from_ranges(entry["units"])
        if "affine" not in entry:
            return Do(site, value, axis, units, unpack(entry["constant"]))
        affine = entry["affine"]
        parents = from_ranges(affine["parents"])
        return Do(site, value, axis, units, unpack(affine["bias"]), parents, unpack(affine["weight"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PlanError(
            f"an entry cannot be read: {error}", at=at, fix="compare it with the entries that `Plan.save` writes"
        ) from error


def pack_text(name: str, array: Array) -> Any:
    """An array as JSON on its own: for annotations, which have no file beside them."""
    if array.size <= INLINE:
        return array.tolist()
    return {
        "float64": base64.b64encode(np.ascontiguousarray(array, dtype="<f8").tobytes()).decode(),
        "shape": list(array.shape),
    }


def unpack_text(packed: Any) -> Array:
    if isinstance(packed, dict):
        return np.frombuffer(base64.b64decode(packed["float64"]), dtype="<f8").reshape(packed["shape"])
    return np.asarray(packed, dtype=np.float64)


def to_ranges(index: Sequence[int]) -> str | list[int]:
    """`0:3,7` for 0, 1, 2, 7; a list where the order is not ascending."""
    if list(index) != sorted(set(index)):
        return [int(i) for i in index]
    runs: list[list[int]] = []
    for i in index:
        if runs and i == runs[-1][1]:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1])
    return ",".join(str(a) if b == a + 1 else f"{a}:{b}" for a, b in runs)


def from_ranges(text: str | list[int]) -> tuple[int, ...]:
    if isinstance(text, list):
        return tuple(int(i) for i in text)
    positions: list[int] = []
    for part in text.split(",") if text else []:
        first, _, last = part.partition(":")
        positions.extend(range(int(first), int(last)) if last else [int(first)])
    return tuple(positions)
