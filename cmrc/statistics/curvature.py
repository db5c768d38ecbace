"""Per sample, the loss's derivatives by the values of a site: g = ∂L/∂a, h = ∂²L/∂a², and factors B of H ≈ BᵀB.

With logits z, J = ∂z/∂a and M = ∂²L/∂z² (paper appendix A.1, eq. g-def):

    loss             M                    g            the point of it
    cross-entropy    diag p − p pᵀ        Jᵀ(p − y)    the task, with labels
    kl               diag p − p pᵀ        0            distance to the model's own output; no labels
    logit            2 I                  0            squared logit distortion through the true Jacobian; no labels
    squared-error    I                    Jᵀ(z − y)    regression: L = ½‖z − y‖²

H = JᵀMJ (Gauss-Newton) = Σ_k B_k B_kᵀ, where for the first two B_k = √p_k (J_k − Σ p J). At the operand of the op that makes
the logits J is that op's W, so everything is in closed form and any host will do: h = p W² − (p W)². Elsewhere J takes one
vjp for each logit, which torch takes. `full` adds what Gauss-Newton leaves out of h where functions bend: for every
smooth pointwise a = σ(z) above the site, Σ_i (∂L/∂a_i) σ''(z_i) (∂z_i/∂a_j)². For affine and pointwise ops that is exact.
`monte-carlo` draws labels ŷ ~ p instead of one vjp per logit: E[∇L(ŷ) ∇L(ŷ)ᵀ] = JᵀMJ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

from cmrc.errors import StatsError
from cmrc.hosts.protocols import LABELLED, LOSSES, Derivatives, DerivativesRequest, Host
from cmrc.ir.graph import Array
from cmrc.program.sites import Sites
from cmrc.statistics.batches import Batch
from cmrc.statistics.columns import Columns
from cmrc.statistics.readers import closed_form

NO_LABEL = -100  # as torch's cross-entropy has it


@dataclass(frozen=True, slots=True)
class Options:
    """How derivatives are taken: see `derivatives`."""

    loss: str = "cross-entropy"
    curvature: str = "auto"
    draws: int = 8
    seed: int = 0


def derivatives(
    program: Sites, host: Host, batch: Batch, columns: Sequence[Columns], options: Options, number: int, factors: bool
) -> list[Derivatives]:
    """The derivatives at every site for a batch: in closed form where that is possible, else by torch."""
    if options.loss not in LOSSES:
        raise StatsError(f"loss={options.loss!r} is not known", fix=f"use one of {', '.join(LOSSES)}")
    if options.loss in LABELLED and batch.labels is None:
        raise StatsError(
            f"the loss {options.loss!r} needs labels, and the data have none",
            fix='give (inputs, labels) or a mapping with "labels"; or loss="kl" or "logit", which need none',
        )
    if options.loss == "cross-entropy" and batch.labels is not None:
        _require_classes(batch.labels, program.values[program.graph.outputs[0]].shape[-1])
    weights = [closed_form(program, c) for c in columns]
    if options.curvature == "auto" and all(w is not None for w in weights):
        arrays = host.run(batch.inputs, [c.value for c in columns])
        logits = arrays[0].astype(np.float64)
        return [
            at_last_affine(value, c.axis, logits, w, options.loss, batch.labels, factors)
            for value, c, w in zip(arrays[-len(columns) :], columns, weights, strict=True)
            if w is not None
        ]
    request = DerivativesRequest(
        batch.inputs,
        batch.labels,
        tuple(c.value for c in columns),
        options.loss,
        options.curvature,
        options.draws,
        options.seed * 1_000_003 + number,  # another one per batch
        factors,
    )
    return host.differentiate(request)


def _require_classes(labels: Array, classes: int | str) -> None:
    """That every label is the number of a class, or `NO_LABEL`."""
    if labels.dtype.kind not in "iu":
        raise StatsError(
            f"the labels are of type {labels.dtype}, not whole numbers", fix="give the number of the class per sample"
        )
    wrong = labels[(labels != NO_LABEL) & (labels < 0)].tolist()
    if isinstance(classes, int):
        wrong += labels[labels >= classes].tolist()
    if wrong:
        raise StatsError(
            f"there is a label {wrong[0]}, but the model has {classes} classes",
            fix=f"count classes from 0; {NO_LABEL} marks a position without a label",
        )


def at_last_affine(
    value: Array, axis: int, logits: Array, weight: Array, loss: str, labels: Array | None, factors: bool
) -> Derivatives:
    """logits = W a + b: g = (p − y) W and h = p W² − (p W)² for cross-entropy, and correspondingly for the other losses."""
    residual = np.zeros_like(logits)
    if loss in ("cross-entropy", "kl"):
        p = softmax(logits, axis=-1)
        if loss == "cross-entropy":
            assert labels is not None
            residual, known = p.copy(), np.where(labels == NO_LABEL, 0, labels)[..., None]
            np.put_along_axis(residual, known, np.take_along_axis(p, known, -1) - 1.0, -1)
            residual[labels == NO_LABEL] = 0.0
        h = p @ weight**2 - (p @ weight) ** 2
        mean = p @ weight
        parts = [np.sqrt(p[..., k, None]) * (weight[k] - mean) for k in range(len(weight))] if factors else []
    else:
        if loss == "squared-error":
            assert labels is not None
            residual = logits - labels
        scale = 2.0 if loss == "logit" else 1.0
        h = np.broadcast_to(scale * (weight**2).sum(0), (*logits.shape[:-1], weight.shape[1]))
        parts = [np.broadcast_to(np.sqrt(scale) * row, h.shape) for row in weight] if factors else []

    def placed(array: Array) -> Array:
        return np.moveaxis(array, -1, axis)

    return Derivatives(
        value, placed(residual @ weight), placed(np.maximum(h, 0.0)), [placed(b) for b in parts], "closed form"
    )
