"""The result of a batch of interventions: for each swap, the original's logits against the reduced model's.

    agree      the same top class; for a regression, no output further off than the tolerance
    kl         KL(original ‖ reduced) of the class distributions
    squared    ‖Δz‖², whose mean is D2
    largest    ‖Δz‖∞
    spread     max Δz − min Δz: what a top class can lose to another
    margin     the original's top logit over its next

Arrays are [R, tokens], one column where the model has one answer to an input; `weights` sum to 1 over the tokens that count.
A regression has margin 2·tolerance and spread 2‖Δz‖∞, so that every certificate keeps its meaning.

Swaps of one **unit** share inputs and are not independent; swaps of different units are. For statements about the population a
unit is a pair of inputs, for statements about a fixed set of inputs it is a single swap, without swaps it is an input.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from cmrc.errors import VerifyError
from cmrc.ir.graph import Array

SHORT = 32  # classes, up to which a maximum is taken across rows


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """One row for each swap."""

    agree: Array
    kl: Array
    squared: Array
    largest: Array
    spread: Array
    margin: Array
    weights: Array
    classes: Array  # the original's top class under the intervention
    rate: Array  # [R], the probability with which a network unit was swapped
    unit: Array  # [R], rising: which swaps belong together
    importance: Array  # [R], within (0, 1]: what a swap counts, the same for all of a unit

    def __len__(self) -> int:
        return len(self.agree)

    def mean(self, values: Array) -> Array:
        """For each swap the mean over its tokens."""
        if values.shape[1] == 1:
            return np.asarray(values[:, 0], dtype=np.float64)
        return np.asarray((values * self.weights).sum(axis=1).clip(0.0, None))

    def per_unit(self, values: Array) -> Array:
        """For each unit the mean over its swaps, and over their tokens."""
        return self._by_unit(self.mean(values))

    @property
    def unit_weights(self) -> Array | None:
        """The weight of each unit; None if all have the same."""
        return None if (self.importance == 1).all() else self._by_unit(self.importance)

    @property
    def binary(self) -> bool:
        """Whether an event on a unit can only happen or not: one swap each, one answer each."""
        return self.agree.shape[1] == 1 and self.units == len(self)

    @property
    def units(self) -> int:
        return len(np.unique(self.unit))

    def average(self, values: Array) -> float:
        """The estimate: the weighted mean over units."""
        return float(np.average(self.per_unit(values), weights=self.unit_weights))

    @property
    def shares(self) -> Array:
        """[R, tokens]: what each token counts in `average`; they sum to 1."""
        _, place, count = np.unique(self.unit, return_inverse=True, return_counts=True)
        swap = self.importance / count[place]
        return np.asarray(self.weights * (swap / swap.sum())[:, None])

    def _by_unit(self, swaps: Array) -> Array:
        if len(self.unit) and self.unit[-1] - self.unit[0] + 1 == len(self.unit):  # a swap each
            return swaps
        starts = np.flatnonzero(np.diff(self.unit, prepend=-1))
        return np.asarray(np.add.reduceat(swaps, starts) / np.diff(starts, append=len(swaps)))

    def part(self, rows: slice | Array) -> Evidence:
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def first_units(self, count: int) -> tuple[Evidence, Evidence]:
        """The swaps of the first units, and those of the rest."""
        names = np.unique(self.unit)
        edge = int(np.searchsorted(self.unit, names[count])) if count < len(names) else len(self)
        return self.part(slice(0, edge)), self.part(slice(edge, None))

    @classmethod
    def join(cls, parts: list[Evidence]) -> Evidence:
        if len(parts) == 1:
            return parts[0]
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)})


@dataclass(frozen=True, slots=True)
class Readout:
    """How outputs are read: `classes` (logits along an axis), `binary` (one logit), or `values` within a tolerance."""

    kind: str
    axis: int = -1
    tolerance: float = 0.0

    @classmethod
    def of(cls, shape: tuple[int, ...], kind: str | None, axis: int, tolerance: float | None) -> Readout:
        """The reading asked for, else the one that the output's shape allows."""
        if kind not in (None, "classes", "binary", "values"):
            raise VerifyError(f"outputs cannot be read as {kind!r}", fix="use classes, binary or values")
        if kind == "values" or (kind is None and tolerance is not None):
            if tolerance is None or not tolerance > 0:
                raise VerifyError(
                    "agreement of values needs a tolerance",
                    fix="give tolerance=, in units of the output",
                )
            return cls("values", axis, float(tolerance))
        if len(shape) > 1 and (not -len(shape) <= axis < len(shape) or axis % len(shape) == 0):
            raise VerifyError(
                f"axis {axis} of an output of shape {list(shape)} holds no classes", fix="give class_axis="
            )
        single = len(shape) < 2 or shape[axis] == 1
        if kind == "binary" and not single:
            raise VerifyError(f"an output of shape {list(shape)} has more than one logit", fix='read it as "classes"')
        if kind != "binary" and single:
            raise VerifyError(
                f"an output of shape {list(shape)} has no classes to compare",
                fix='read it as "binary" (the sign of one logit), or give tolerance= for a regression',
            )
        return cls(kind or "classes", axis)

    def logits(self, output: Array) -> Array:
        """[R, tokens, classes] in float64."""
        array = np.asarray(output, dtype=np.float64)
        if self.kind == "values":
            return array.reshape(len(array), 1, -1)
        if self.kind == "binary":
            array = array.reshape(len(array), -1, 1)
            return np.concatenate([np.zeros_like(array), array], axis=2)
        array = np.moveaxis(array, self.axis, -1)
        return array.reshape(len(array), -1, array.shape[-1])


def compare(
    readout: Readout,
    original: Array,
    reduced: Array,
    counted: Array | None,
    rate: Array,
    *,
    unit: Array | None = None,
    importance: Array | None = None,
) -> Evidence:
    """Evidence from the outputs of both under the same interventions. `counted` says which tokens of each row count.

    Without `unit` every row is independent of the others; without `importance` all count alike.
    """
    if original.shape != reduced.shape:
        shapes = f"the original gives {list(original.shape)}, the reduced model {list(reduced.shape)}"
        raise VerifyError(shapes, fix="verify a model that was lowered from this one")
    z, other = readout.logits(original), readout.logits(reduced)
    if not (np.isfinite(z).all() and np.isfinite(other).all()):
        raise VerifyError("there are NaN or infinite outputs", fix="verify on inputs for which both models are finite")
    change = other - z
    most, least = highest(change), -highest(-change)
    largest = np.maximum(np.abs(most), np.abs(least))
    if readout.kind == "values":
        agree, kl = largest <= readout.tolerance, np.full(largest.shape, np.nan)
        spread, margin = 2 * largest, np.full(largest.shape, 2 * readout.tolerance)
        classes = np.zeros(largest.shape, dtype=np.int64)
    else:
        classes = z.argmax(axis=2)
        agree = classes == other.argmax(axis=2)
        log_p, log_q = log_softmax(z), log_softmax(other)
        kl = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=2), 0.0)
        top = np.partition(z, -2, axis=2)
        spread, margin = most - least, top[..., -1] - top[..., -2]
    weights = _weights(counted, largest.shape)
    unit = np.arange(len(largest)) if unit is None else unit
    importance = np.ones(len(largest)) if importance is None else importance
    squared = (change**2).sum(axis=2)
    return Evidence(agree, kl, squared, largest, spread, margin, weights, classes, rate, unit, importance)


def highest(z: Array) -> Array:
    """The maximum over the last axis. numpy takes one row after the other, which costs several times as much where rows are short."""
    turned = np.ascontiguousarray(np.moveaxis(z, -1, 0)) if z.shape[-1] <= SHORT else np.moveaxis(z, -1, 0)
    return np.asarray(turned.max(axis=0))


def log_softmax(z: Array) -> Array:
    """Over the last axis."""
    shifted = z - highest(z)[..., None]
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _weights(counted: Array | None, shape: tuple[int, ...]) -> Array:
    if counted is None:
        return np.full(shape, 1.0 / shape[1])
    if counted.shape != shape:
        raise VerifyError(
            f"the padding is of shape {list(counted.shape)}, the model answers {list(shape)}",
            fix="give counted= as [inputs, tokens], true where a token counts",
        )
    total = counted.sum(axis=1, keepdims=True)
    if not total.all():
        raise VerifyError("an input has no token that counts", fix="leave such inputs out")
    return np.asarray(counted / total)
