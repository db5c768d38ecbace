"""What differentiating a loss by inner values asks of a host, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cmrc.ir.graph import Array

LOSSES = ("cross-entropy", "kl", "logit", "squared-error")
LABELLED = ("cross-entropy", "squared-error")


@dataclass(frozen=True, slots=True, eq=False)
class DerivativesRequest:
    """One batch, the values to differentiate by, and how: `curvature` is auto, full, gauss-newton or monte-carlo.

    `seed` is that of this batch; `draws` counts for monte-carlo only. `factors` asks for the B of H = Σ BᵀB as well.
    """

    inputs: Sequence[Any] | Mapping[str, Any]
    labels: Array | None
    values: tuple[str, ...]
    loss: str
    curvature: str
    draws: int
    seed: int
    factors: bool

    @property
    def labelled(self) -> bool:
        return self.loss in LABELLED


@dataclass(frozen=True, slots=True, eq=False)
class Derivatives:
    """At one value and for one batch, all in the value's own shape. `factors` are empty unless they were asked for."""

    value: Array
    gradient: Array
    curvature: Array
    factors: list[Array]
    how: str
