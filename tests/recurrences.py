"""Recurrent ops by hand: one step of each as the ONNX standard spells it, in float64, with units replaced at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cmrc.ir.graph import Array

Clamp = Callable[[Array], Array]


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def unrolled(
    op: str, x: Array, w: Array, r: Array, b: Array, h: Array, c: Array, clamp: Clamp,
    *, peepholes: Array | None = None, reset_after: bool = True, lengths: Array | None = None, reverse: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """What one direction returns: the hidden state at every step, and the last. Gates are ordered as ONNX does."""
    steps, hidden = len(x), r.shape[1]
    wb, rb = b[: len(b) // 2], b[len(b) // 2 :]
    lengths = np.full(x.shape[1], steps) if lengths is None else lengths
    every = np.zeros((steps, x.shape[1], hidden))
    p = np.zeros(3 * hidden) if peepholes is None else peepholes
    pi, po, pf = p[:hidden], p[hidden : 2 * hidden], p[2 * hidden :]
    h = clamp(h.copy())
    for t in reversed(range(steps)) if reverse else range(steps):
        from_x, from_h = x[t] @ w.T + wb, h @ r.T + rb
        xs, hs = np.split(from_x, len(w) // hidden, axis=1), np.split(from_h, len(w) // hidden, axis=1)
        if op == "LSTM":
            gate_in, forget = sigmoid(xs[0] + hs[0] + pi * c), sigmoid(xs[2] + hs[2] + pf * c)
            cell = forget * c + gate_in * np.tanh(xs[3] + hs[3])
            new = sigmoid(xs[1] + hs[1] + po * cell) * np.tanh(cell)
        elif op == "GRU":
            update, reset = sigmoid(xs[0] + hs[0]), sigmoid(xs[1] + hs[1])
            rows = slice(2 * hidden, None)
            candidate = reset * hs[2] if reset_after else (reset * h) @ r[rows].T + rb[rows]
            new, cell = (1 - update) * np.tanh(xs[2] + candidate) + update * h, c
        else:
            new, cell = np.tanh(xs[0] + hs[0]), c
        running = (t < lengths)[:, None]
        h = np.where(running, clamp(new), h)
        c = np.where(running, cell, c)
        every[t] = np.where(running, h, 0.0)
    return every, h


def held_at(units: Sequence[int], constants: Any, parents: Sequence[int] = (), weight: Any = None) -> Clamp:
    def clamp(h: Array) -> Array:
        h = h.copy()
        rebuilt = 0.0 if weight is None else h[..., list(parents)] @ np.asarray(weight).T
        h[..., list(units)] = np.asarray(constants) + rebuilt
        return h

    return clamp
