"""The model that a plan is for: structure and weights. A plan for another model is refused with the difference.

A fingerprint distinguishes models that people mix up; it does not resist forgery: weights are hashed by xxh3, at the speed of
memory. What is hashed of the structure has a number, the scheme. Fingerprints of different schemes cannot be compared.

1  ops, their operands and results, and the attributes that the IR knows
2  also the attributes and bodies that only the host knows, and the model's inputs and outputs in their order
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import xxhash

from cmrc.errors import FingerprintError
from cmrc.ir.graph import Apply, ArrayLiteral, Graph, Leaf, Operand, Value

SCHEME = 2
MANY = 1 << 27  # from this many numbers on, several threads read them
WORKERS = 4
FIX = "lower the model that the plan was made for, or make a plan for this one"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest of the wiring, the count of each op, and a digest of every parameter."""

    structure: str
    ops: dict[str, int]
    weights: dict[str, str]
    scheme: int = SCHEME

    @property
    def digest(self) -> str:
        """One short name for all of it."""
        text = self.structure + "".join(f"{name}={value};" for name, value in sorted(self.weights.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme,
            "digest": self.digest,
            "structure": self.structure,
            "ops": self.ops,
            "weights": self.weights,
        }

    @classmethod
    def from_json(cls, document: Any) -> Self:
        structure, ops, weights = str(document["structure"]), dict(document["ops"]), dict(document["weights"])
        return cls(structure, ops, weights, int(document.get("scheme", 1)))

    def require(self, other: Fingerprint, at: str, *, what: str = "the plan was", fix: str = FIX) -> None:
        """Raise with what differs unless `other` (the model at hand) is the model of this fingerprint."""
        if self.scheme != other.scheme:
            raise FingerprintError(
                f"{what} made by another version of cmrc, whose fingerprints cannot be compared with this one's "
                f"(scheme {self.scheme}, not {other.scheme})",
                at=at,
                fix="make it again; or, if you know that the model is the same, remove `model` from the file",
            )
        if self != other:
            raise FingerprintError(f"{what} made for another model: {difference(self, other)}", at=at, fix=fix)


def difference(plan: Fingerprint, model: Fingerprint) -> str:
    """The first difference that a person would want to know."""
    counts = [f"{plan.ops.get(op, 0)} {op} there, {model.ops.get(op, 0)} here"
              for op in sorted({*plan.ops, *model.ops}) if plan.ops.get(op, 0) != model.ops.get(op, 0)]  # fmt: skip
    if counts:
        return "; ".join(counts[:3])
    names = sorted(set(plan.weights) ^ set(model.weights))
    if names:
        return f"parameters {', '.join(names[:3])} exist only in one of them"
    resized = [n for n in plan.weights if plan.weights[n].split(":")[0] != model.weights[n].split(":")[0]]
    if resized:
        n = resized[0]
        return f"{n} is {plan.weights[n].split(':')[0]} there, {model.weights[n].split(':')[0]} here"
    if plan.structure != model.structure:
        return "the same ops and parameters differ in wiring, sizes, names, attributes or outputs"
    changed = [n for n in plan.weights if plan.weights[n] != model.weights[n]]
    return f"the values of {len(changed)} of {len(plan.weights)} parameters differ, {changed[0]} first"


def fingerprint(graph: Graph, details: Mapping[str, str] | None = None) -> Fingerprint:
    """Of structure and weights; reads every parameter once. `details` are the host's, by the origin of nodes."""
    known = details or {}
    lines = [repr(([_result(value) for value in graph.inputs], graph.outputs))]
    kinds = [node.kind for node in graph.nodes]
    for node, kind in zip(graph.nodes, kinds, strict=True):
        operands = [operand if type(operand) is str else _operand(operand) for operand in node.inputs]
        meaning = known.get(node.origin) or sorted(node.attrs.items())
        lines.append(repr((node.op, kind, operands, [_result(value) for value in node.outputs], meaning)))
    wiring = hashlib.sha256("".join(lines).encode())
    leaves = graph.leaves()
    digests = dict(zip(leaves, _digests(leaves.values()), strict=True))
    return Fingerprint(wiring.hexdigest()[:16], dict(sorted(Counter(kinds).items())), dict(sorted(digests.items())))


def _digests(leaves: Collection[Leaf]) -> list[str]:
    """In the order of the leaves. Several threads can wait for the disk at the same time."""
    if sum(math.prod(leaf.shape) for leaf in leaves) < MANY:
        return [_digest(leaf) for leaf in leaves]
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(_digest, leaves))


def _result(value: Value) -> tuple[Any, ...]:
    """A value without the symbols of its dynamic sizes, which change from one export to the next."""
    return value.name, value.dtype, [n if type(n) is int else "?" for n in value.shape]


def _operand(operand: Operand) -> Any:
    if isinstance(operand, str):
        return operand
    if isinstance(operand, Leaf):
        return operand.name
    if isinstance(operand, ArrayLiteral):
        return repr(operand.array.tolist())
    if isinstance(operand, Apply):
        return operand.op, [_operand(part) for part in operand.inputs], sorted(operand.attrs.items()), operand.shape
    return operand


def _digest(leaf: Leaf) -> str:
    data: Any = np.ascontiguousarray(leaf.load())  # a buffer, which its type says only from Python 3.12 on
    digest = xxhash.xxh3_128_hexdigest(data)
    return f"{leaf.dtype}{list(leaf.shape)}:{digest[:16]}"
