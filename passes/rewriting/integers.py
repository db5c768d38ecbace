"""Affine ops whose weights are stored as integers (`ir/tensors.py`): what folding may do without rounding.

    x_S := k · t,  W = Q · s,  b = B · s t      ->      b' = (B + Q_S k) · s t,  a sum of whole numbers

The activation must have a grid of its own (the model quantises it); after that quantisation the constants are on it too.
Otherwise the bias is folded as a floating-point number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cmrc.ir.graph import Array, Node, Operand, Tensor, apply, attributes, literal
from cmrc.ir.ops.affine import LinearAttrs
from cmrc.ir.ops.functions import PointwiseAttrs
from cmrc.ir.tensors import Quantised, constant, cuts_blocks, quantised
from cmrc.passes.rewriting.rewriter import Sweep

NOT_AFFINE = (
    "its weights are integers on a grid, to which an affine map would have to be rounded; replace the units by constants, "
    "or lower the float model, then quantise"
)
MOVING = ("reshape", "transpose", "select", "expand")
WIDTH = 256  # weights of 8 bits
LARGEST = 2**30  # half of the range of an int32: the existing bias may use the other half


def blocks_cut(weight: Quantised, axis: int, keep: Sequence[int]) -> str:
    """Why a weight cannot be cut to these positions; empty if it can."""
    if not weight.block or weight.axis != axis or not len(keep):
        return ""
    if not cuts_blocks(keep, weight.block, weight.numbers.shape[axis]):
        return ""
    return (
        f"its weights share scales in blocks of {weight.block} units, and only whole blocks can go: "
        f"units 0 to {weight.block - 1}, {weight.block} to {2 * weight.block - 1}, and so on"
    )


def rounding_needed(weight: Quantised, axis: int, keep: Sequence[int], *, mixed: bool) -> str:
    """Why a fold into a weight would have to round its integers; empty if it would not. `mixed`: columns are added to others."""
    return NOT_AFFINE if mixed else blocks_cut(weight, axis, keep)


def integer_bias(
    sweep: Sweep,
    node: Node,
    x: str,
    weight: Quantised,
    slab: Array,
    *,
    outputs: int,
    add_up: Callable[[Node, Array], Tensor],
) -> Tensor | None:
    """The bias after a fold of whole numbers; `None` if the numbers are not whole.

    `outputs` is the axis of the weight's outputs; `add_up` computes Σ W_s c_s for a node with given weights and for given constants.
    """
    bias, step = node.inputs[2] if len(node.inputs) > 2 else None, _step_of(sweep, x)
    if step is None or weight.block or weight.axis not in (None, outputs):
        return None
    if attributes(node, LinearAttrs).get("alpha", 1.0) != 1.0 or attributes(node, LinearAttrs).get("beta", 1.0) != 1.0:
        return None
    steps = on_grid(slab.reshape(-1), step)
    kernel = int(np.prod(weight.numbers.shape[2:], dtype=np.int64))
    if steps is None or not fits_in_int32(steps, WIDTH * kernel):
        return None
    integers = _bias_on_grid(weight, bias, step)
    if integers is None:
        return None
    added = add_up(node.with_inputs((x, weight.whole_numbers(), None)), steps)
    numbers = apply("pointwise", (integers.numbers, added), {"fn": "add", "rank": 1}, added.shape, "int32")
    return Quantised(numbers, integers.scale, integers.zero, integers.axis).tensor()


def _tensor(operand: Operand) -> Tensor | None:
    return operand if isinstance(operand, Tensor) else None


def _step_of(sweep: Sweep, x: str) -> float | None:
    """The step of the grid of a quantised activation, if it has one scale for all units."""
    maker = sweep.producers.get(x)
    while maker is not None and maker.op in MOVING and isinstance(maker.inputs[0], str):
        maker = sweep.producers.get(maker.inputs[0])
    if maker is None or maker.op != "pointwise" or attributes(maker, PointwiseAttrs)["fn"] != "dequantize":
        return None
    scale = _tensor(maker.inputs[1])
    if scale is None or int(np.prod(scale.shape, dtype=np.int64)) != 1:
        return None
    return float(constant(scale).reshape(()))


def _bias_on_grid(weight: Quantised, bias: Operand, step: float) -> Quantised | None:
    """The existing bias on the grid of weight and activation; 0 if there is none."""
    scale = constant(weight.scale).reshape(-1) * step
    if bias is None:
        grid = literal(scale if weight.axis is not None else scale.reshape(()), "float32")
        outs = weight.numbers.shape[weight.axis] if weight.axis is not None else 1
        nothing = literal(np.zeros(outs if weight.axis is not None else (1,)), "int32")
        return Quantised(nothing, grid, None, None if weight.axis is None else 0)
    integers = quantised(_tensor(bias))
    if integers is None or integers.numbers.dtype != "int32" or not is_nothing(integers.zero):
        return None
    own = constant(integers.scale).reshape(-1)
    return integers if own.size in (1, scale.size) and np.allclose(own, scale, rtol=1e-5, atol=0.0) else None


def on_grid(values: Array, step: float) -> Array | None:
    """values / step, if those are whole numbers."""
    steps = np.rint(values / step)
    return steps if bool(np.all(np.abs(steps * step - values) <= 1e-6 * np.abs(values))) else None


def fits_in_int32(steps: Array, width: int) -> bool:
    """Whether a sum of products with weights of `width` values cannot overflow."""
    return float(np.abs(steps).sum()) * width < LARGEST


def is_nothing(zero: Tensor | None) -> bool:
    return zero is None or not np.any(constant(zero))
