"""What model a plan was made for: structure and weights. A plan for another model is refused with the difference.

It tells models apart that people mix up, not one that somebody forged: weights are hashed by xxh3, at the speed of memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import xxhash

from cmrc.errors import FingerprintError
from cmrc.ir.graph import Graph, Leaf, Literal

FIX = "lower the model that the plan was made for, or make a plan for this one"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest of the wiring, the count of each op, and a digest of every parameter."""

    structure: str
    ops: dict[str, int]
    weights: dict[str, str]

    @property
    def digest(self) -> str:
        """One short name for all of it."""
        text = self.structure + "".join(f"{name}={value};" for name, value in sorted(self.weights.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {"digest": self.digest, "structure": self.structure, "ops": self.ops, "weights": self.weights}

    @classmethod
    def from_json(cls, document: Any) -> Self:
        return cls(str(document["structure"]), dict(document["ops"]), dict(document["weights"]))

    def require(self, other: Fingerprint, at: str, *, what: str = "the plan was", fix: str = FIX) -> None:
        """Raise with what differs unless `other` (the model at hand) is the model of this fingerprint."""
        if self != other:
            raise FingerprintError(f"{what} made for another model: {difference(self, other)}", at=at, fix=fix)


def difference(plan: Fingerprint, model: Fingerprint) -> str:
    """The first thing a person would want to know."""
    counts = [f"{plan.ops.get(op, 0)} {op} there, {model.ops.get(op, 0)} here"
              for op in sorted({*plan.ops, *model.ops}) if plan.ops.get(op, 0) != model.ops.get(op, 0)]  # fmt: skip
    if counts:
        return "; ".join(counts[:3])
    names = sorted(set(plan.weights) ^ set(model.weights))
    if names:
        return f"parameters {', '.join(names[:3])} exist in one of them only"
    resized = [n for n in plan.weights if plan.weights[n].split(":")[0] != model.weights[n].split(":")[0]]
    if resized:
        n = resized[0]
        return f"{n} is {plan.weights[n].split(':')[0]} there, {model.weights[n].split(':')[0]} here"
    if plan.structure != model.structure:
        return "the same ops and parameters are wired, sized or named differently"
    changed = [n for n in plan.weights if plan.weights[n] != model.weights[n]]
    return f"the values of {len(changed)} of {len(plan.weights)} parameters differ, {changed[0]} first"


def fingerprint(graph: Graph) -> Fingerprint:
    """Of structure and weights; reads every parameter once."""
    wiring = hashlib.sha256()
    for node in graph.nodes:
        inputs = [
            o.name if isinstance(o, Leaf) else repr(o.array.tolist()) if isinstance(o, Literal) else o
            for o in node.inputs
        ]
        attrs = [node.kind, *sorted(node.attrs.items())]
        shapes = [[n if isinstance(n, int) else "?" for n in v.shape] for v in node.outputs]
        wiring.update(repr((node.op, inputs, [v.name for v in node.outputs], shapes, attrs)).encode())
    weights = {name: _digest(leaf) for name, leaf in sorted(graph.leaves().items())}
    ops = Counter(node.kind for node in graph.nodes)
    return Fingerprint(wiring.hexdigest()[:16], dict(sorted(ops.items())), weights)


def _digest(leaf: Leaf) -> str:
    data = np.ascontiguousarray(leaf.load())
    digest = xxhash.xxh3_128_hexdigest(data.view(np.uint8).reshape(-1).data if data.size else b"")
    return f"{leaf.dtype}{list(leaf.shape)}:{digest[:16]}"
