"""The table of aten ops: a row an op. Adding an op is adding one row (and its test).

A row is a function from the node's arguments (in the order of the op's schema, defaults filled in) to a `Read`: the IR
op, which arguments are its operands, and its attributes. `None` means that this form of the op is opaque. `Opaque(why)`
says what a person should know about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx

from cmrc.ir.graph import NO_MARKS, Marks, Shape

aten = torch.ops.aten
TAKES_BIAS = Marks(takes_bias=True)
# The argument of each op that says whether the model trains; export bakes it in as a number.
TRAINING_FLAGS = {"dropout": 2, "feature_dropout": 2, "alpha_dropout": 2, "batch_norm": 5}
# The argument that has the number of groups, and the one that has sizes: written anew when a value shrinks.
GROUPS = {"convolution": 8, "conv1d": 6, "conv2d": 6, "conv3d": 6,
          "conv_transpose1d": 6, "conv_transpose2d": 6, "conv_transpose3d": 6}  # fmt: skip
SIZES = {"full": 0, "view": 1, "reshape": 1, "_unsafe_view": 1, "expand": 1, "broadcast_to": 1, "unflatten": 2}
# Ops that only turn a matrix, and the arguments of a product that may be one: a product with w.t() is linear in w.
TURNS = ("t", "transpose", "permute")
FACTORS = {"matmul": (1, 0), "mm": (1, 0), "addmm": (2,)}
Position: TypeAlias = int | tuple[int, int]  # an argument, or an entry of an argument that is a list


@dataclass(frozen=True, slots=True)
class Read:
    """What a node is in the IR. `args` are the positions of its operands among the arguments."""

    op: str
    args: tuple[Position, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    marks: Marks = NO_MARKS
    parts: tuple[dict[str, Any], ...] | None = None  # for ops with several results: the attributes of each


@dataclass(frozen=True, slots=True)
class Opaque:
    """A form of the op that replacements cannot pass, and why."""

    why: str


class Arguments:
    """The arguments of a node as its schema orders them, with shapes at hand."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.values = arguments(node)

    def __getitem__(self, i: int) -> Any:
        return self.values[i]

    def shape(self, i: int) -> Shape:
        return shape_of(self.values[i])

    def rank(self, i: int = 0) -> int:
        return len(self.shape(i))

    def out_shape(self) -> Shape:
        return shape_of(self.node)

    def dims(self, i: int, rank: int | None = None) -> tuple[int, ...]:
        """An argument that names axes, counted from the front; nothing given means all."""
        rank = self.rank() if rank is None else rank
        dims = self.values[i]
        if dims is None or dims == []:
            return tuple(range(rank))
        return tuple(int(d) % max(rank, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


def arguments(node: fx.Node) -> list[Any]:
    """Positional, keyword and default arguments in schema order."""
    if not hasattr(node.target, "_schema"):
        return list(node.args)
    found = list(node.args)
    found += [node.kwargs.get(parameter.name, parameter.default) for parameter in parameters(node.target)[len(found) :]]
    return found


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an op's schema."""

    name: str
    default: Any
    by_keyword: bool


@cache
def parameters(target: Any) -> tuple[Parameter, ...]:
    """The schema of an op, read once: torch makes its parts anew whenever they are asked for."""
    return tuple(
        Parameter(a.name, a.default_value if a.has_default_value() else None, a.kwarg_only)
        for a in target._schema.arguments
    )


def opname(node: fx.Node) -> str:
    """`relu` for aten.relu.default, `getitem` for operator.getitem."""
    return str(getattr(node.target, "_opname", "")) or getattr(node.target, "__name__", "")


def shape_of(node: Any) -> Shape:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return ()
    sizes: list[Any] = list(value.shape)  # integers, or torch's symbols
    return tuple(int(n) if isinstance(n, int) else str(n).replace(" ", "") for n in sizes)


Row: TypeAlias = Callable[[Arguments], Read | Opaque | None]
ROWS: dict[Any, Row] = {}


def row(*names: str) -> Callable[[Row], Row]:
    """Register a row for aten overloads by name; a name that this torch does not have is left out."""

    def register(function: Row) -> Row:
        for name in names:
            packet, _, overload = name.partition(".")
            target = getattr(getattr(aten, packet, None), overload or "default", None)
            if target is not None:
                ROWS[target] = function
        return function

    return register


def _tuple(value: Any, rank: int) -> tuple[int, ...]:
    entries = list(value) if isinstance(value, (list, tuple)) else [value]
    return tuple(int(v) for v in (entries * rank if len(entries) == 1 else entries))


# ---------------------------------------------------------------- affine ops


@row("linear")
def _(a: Arguments) -> Read:
    return Read("linear", (0, 1, 2), {"axis": a.rank() - 1, "w_in": 1, "w_out": 0}, TAKES_BIAS)


@row("addmm")
def _(a: Arguments) -> Read | None:
    if a[3] != 1 or a[4] != 1:
        return None
    return Read("linear", (1, 2, 0), {"axis": 1, "w_in": 0, "w_out": 1}, TAKES_BIAS)


@row("matmul", "mm", "bmm")
def _(a: Arguments) -> Read:
    return Read("matmul", (0, 1))


def _conv(
    a: Arguments, stride: Any, padding: Any, dilation: Any, groups: int, transposed: bool, more: Any
) -> Read | None:
    rank = a.rank(1) - 2
    if a.rank(1) < 3 or not isinstance(a.shape(1)[0], int):
        return None
    kernel = [int(k) for k in a.shape(1)[2:]]
    steps, spread = _tuple(stride, rank), _tuple(dilation, rank)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        pad = tuple((t // 2, t - t // 2) for t in totals)
    else:
        pad = tuple((p, p) for p in ((0,) * rank if padding == "valid" else _tuple(padding, rank)))
    attrs = {
        "axis": a.rank() - rank - 1,
        "stride": steps,
        "pad": pad,
        "dilation": spread,
        "groups": int(groups),
    }
    if transposed:
        attrs |= {"transposed": True, "output_padding": _tuple(more, rank)}
    return Read("conv", (0, 1, 2), attrs, TAKES_BIAS)


@row("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding")
def _(a: Arguments) -> Read | None:
    return _conv(a, a[3], a[4], a[5], a[6], False, 0)


@row("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
def _(a: Arguments) -> Read | None:
    return _conv(a, a[3], a[4], a[7], a[6], True, a[5])


@row("convolution")
def _(a: Arguments) -> Read | None:
    return _conv(a, a[3], a[4], a[5], a[8], a[6], a[7])


@row("scaled_dot_product_attention")
def _(a: Arguments) -> Read | Opaque:
    if a[4]:
        return Opaque("it drops at random: trace the model in eval mode")
    scale = float(a[6]) if a[6] is not None else 1.0 / math.sqrt(int(a.shape(0)[-1]))
    attrs = {"scale": scale, "causal": bool(a[5])}
    if a.rank(0) > 2 and a.shape(0)[-3] != a.shape(1)[-3] and not a[7]:
        return Opaque("its heads are broadcast")
    return Read("attention", (0, 1, 2, 3), attrs)


@row("embedding")
def _(a: Arguments) -> Read:
    return Read("embedding", (1, 0))


@row("index.Tensor")
def _(a: Arguments) -> Read | None:
    """table[ids]: rows of a table, as an embedding takes them; a row may have axes of its own."""
    if len(a[1]) != 1 or a.rank() < 2 or not isinstance(a[1][0], fx.Node):
        return None
    return None if a[1][0].meta["val"].dtype == torch.bool else Read("embedding", ((1, 0), 0))


# ---------------------------------------------------------------- element by element


def pointwise(fn: str, *args: int, **attrs: Any) -> Row:
    return lambda a: Read("pointwise", args or (0,), {"fn": fn, **attrs})


for _name in ("relu", "silu", "sigmoid", "tanh", "mish", "erf", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt",
              "reciprocal", "abs", "neg", "sin", "cos", "sign", "floor", "ceil", "square"):  # fmt: skip
    row(_name)(pointwise(_name))
for _name, _fn in {"hardswish": "hard_swish", "hardsigmoid": "hard_sigmoid", "round": "round",
                   "log_sigmoid": "log_sigmoid", "logical_not": "not", "bitwise_not": "not"}.items():  # fmt: skip
    row(_name)(pointwise(_fn))
for _name, _fn in {
    "mul": "mul", "div": "div", "maximum": "max", "minimum": "min", "pow": "pow", "eq": "equal", "ne": "not_equal",
    "gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "logical_and": "and", "logical_or": "or",
    "bitwise_and": "and", "bitwise_or": "or", "fmod": "fmod",
}.items():  # fmt: skip
    row(_name, *(f"{_name}.{o}" for o in ("Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar")))(pointwise(_fn, 0, 1))
DROPS = "it drops at random: trace the model in eval mode"
for _name in ("dropout", "feature_dropout", "alpha_dropout"):
    row(_name)(lambda a: Opaque(DROPS) if a[2] else Read("pointwise", (0,), {"fn": "identity"}))
row("clone", "contiguous", "detach", "detach_", "alias", "lift_fresh_copy", "native_dropout")(pointwise("identity"))
row("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")(pointwise("where", 0, 1, 2))
row("masked_fill.Scalar", "masked_fill.Tensor")(pointwise("where", 1, 2, 0))
row("prelu")(lambda a: Read("pointwise", (0, 1), {"fn": "prelu", "align": (None, (min(1, a.rank() - 1),))}))


@row("add.Tensor", "add.Scalar")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0, 1), {"fn": "add", **({"alpha": float(a[2])} if a[2] != 1 else {})})


@row("addcmul")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0, 1, 2), {"fn": "addcmul", **({"value": float(a[3])} if a[3] != 1 else {})})


@row("sub.Tensor", "sub.Scalar", "rsub.Tensor", "rsub.Scalar")
def _(a: Arguments) -> Read:
    fn = "rsub" if "rsub" in str(a.node.target) else "sub"
    return Read("pointwise", (0, 1), {"fn": fn, **({"alpha": float(a[2])} if a[2] != 1 else {})})


@row("relu6")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "clip", "min": 0.0, "max": 6.0})


@row("hardtanh", "clamp")
def _(a: Arguments) -> Read:
    bounds = {name: float(v) for name, v in (("min", a[1]), ("max", a[2])) if v is not None}
    return Read("pointwise", (0,), {"fn": "clip", **bounds})


@row("clamp_min", "clamp_max")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "clip", "min" if "min" in str(a.node.target) else "max": float(a[1])})


@row("leaky_relu")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "leaky_relu", "alpha": float(a[1])})


@row("elu")
def _(a: Arguments) -> Read:
    factors = {"alpha": float(a[1]), "gamma": float(a[2]), "input_scale": float(a[3])}
    return Read("pointwise", (0,), {"fn": "elu", **factors})


@row("celu")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "celu", "alpha": float(a[1])})


row("selu")(pointwise("selu"))


@row("gelu")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "gelu_tanh" if a[1] == "tanh" else "gelu"})


@row("softplus")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "softplus", "beta": float(a[1]), "threshold": float(a[2])})


@row("softshrink", "hardshrink")
def _(a: Arguments) -> Read:
    soft = "soft" in str(a.node.target)
    return Read("pointwise", (0,), {"fn": "shrink", "lambd": float(a[1]), "bias": float(a[1]) if soft else 0.0})


@row("threshold")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "threshold", "threshold": float(a[1]), "value": float(a[2])})


@row("to.dtype", "to.dtype_layout", "to.other", "_to_copy", "type_as", "to.device")
def _(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "cast", "dtype": str(a.node.meta["val"].dtype).removeprefix("torch.")})


@row("batch_norm")
def _(a: Arguments) -> Read | Opaque:
    if a[5]:
        return Opaque("it uses the statistics of the batch: trace the model in eval mode")
    align = (None, *((min(1, a.rank() - 1),),) * 4)
    return Read("pointwise", (0, 1, 2, 3, 4), {"fn": "batch_norm", "eps": float(a[7]), "align": align})


# ---------------------------------------------------------------- along some axes


def _along(a: Arguments, fn: str, axes: Sequence[int], *args: Position, **attrs: Any) -> Read:
    return Read("along", (0, *args), {"fn": fn, "axes": tuple(axes), **attrs})


@row("mean", "mean.dim", "sum", "sum.dim_IntList", "amax", "amin", "prod.dim_int", "argmax", "argmin", "var.correction",
     "std.correction", "logsumexp", "any.dim", "all.dim", "cumsum")  # fmt: skip
def _(a: Arguments) -> Read:
    name = str(a.node.target).split(".")[1]
    whole = len(a.values) < 2 or (str(a.node.target).endswith(".default") and name in ("mean", "sum"))
    axes = tuple(range(a.rank())) if whole else a.dims(1)
    return _along(a, name, axes, drop=len(a.out_shape()) < a.rank())


@row("linalg_vector_norm")
def _(a: Arguments) -> Read | None:
    return _along(a, "l2", a.dims(2), drop=not a[3]) if a[1] == 2 and a[4] is None else None


@row("softmax.int", "log_softmax.int", "_softmax", "_log_softmax")
def _(a: Arguments) -> Read:
    return _along(a, str(a.node.target).split(".")[1].lstrip("_"), a.dims(1))


def _pool(a: Arguments, fn: str, rank: int, **more: Any) -> Read:
    kernel = _tuple(a[1], rank)
    stride = _tuple(a[2], rank) if a[2] else kernel
    pad = tuple((p, p) for p in _tuple(a[3], rank))
    axes = range(a.rank() - rank, a.rank())
    return _along(a, fn, axes, kernel=kernel, stride=stride, pad=pad, **more)


@row("max_pool1d", "max_pool2d", "max_pool3d")
def _(a: Arguments) -> Read:
    rank = int(str(a.node.target).split(".")[1][-2])
    return _pool(a, "max_pool", rank, dilation=_tuple(a[4], rank), ceil=bool(a[5]))


@row("max_pool2d_with_indices", "max_pool3d_with_indices")
def _(a: Arguments) -> Read:
    rank = int(str(a.node.target).split(".")[1].removesuffix("_with_indices")[-2])
    pool = _pool(a, "max_pool", rank, dilation=_tuple(a[4], rank), ceil=bool(a[5]))
    return Read("along", (0,), parts=(pool.attrs, {"fn": "max_pool_indices", "axes": pool.attrs["axes"]}))


@row("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _(a: Arguments) -> Read:
    axes = tuple(range(a.rank() - int(str(a.node.target).split(".")[1][-2]), a.rank()))
    parts = ({"fn": "adaptive_max_pool", "axes": axes}, {"fn": "max_pool_indices", "axes": axes})
    return Read("along", (0,), parts=parts)


@row("max.dim", "min.dim")
def _(a: Arguments) -> Read:
    name, axes = str(a.node.target).split(".")[1], a.dims(1)
    values = {"fn": f"a{name}", "axes": axes, "drop": not a[2]}
    return Read("along", (0,), parts=(values, {**values, "fn": f"arg{name}"}))


@row("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _(a: Arguments) -> Read:
    rank = int(str(a.node.target).split(".")[1][-2])
    divisor = a[6] if len(a.values) > 6 else None
    return _pool(a, "avg_pool", rank, ceil=bool(a[4]), include_pad=bool(a[5]), divisor=divisor)


@row("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def _(a: Arguments) -> Read:
    rank = int(str(a.node.target).split(".")[1][-2])
    axes = range(a.rank() - rank, a.rank())
    if all(n == 1 for n in _tuple(a[1], rank)):
        return _along(a, "mean", axes)
    return _along(a, "adaptive_avg_pool", axes)


@row("layer_norm")
def _(a: Arguments) -> Read:
    axes = range(a.rank() - len(a[1]), a.rank())
    return _along(a, "layer_norm", axes, 2, 3, eps=float(a[4]))


@row("rms_norm")
def _(a: Arguments) -> Read:
    axes = range(a.rank() - len(a[1]), a.rank())
    eps = float(a[3]) if a[3] is not None else torch.finfo(a.node.meta["val"].dtype).eps
    return _along(a, "rms_norm", axes, 2, eps=eps)


@row("group_norm")
def _(a: Arguments) -> Read:
    return _along(a, "group_norm", range(1, a.rank()), 2, 3, eps=float(a[4]), align=(None, (1,), (1,)))


@row("instance_norm")
def _(a: Arguments) -> Read | Opaque:
    if not a[5]:
        return Opaque("it uses running statistics")
    return _along(a, "instance_norm", range(2, a.rank()), 1, 2, eps=float(a[7]), align=(None, (1,), (1,)))


@row("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec", "upsample_bilinear2d.vec",
     "upsample_linear1d.vec", "upsample_bicubic2d.vec", "upsample_trilinear3d.vec", "upsample_nearest2d",
     "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa.vec",
     "_upsample_bicubic2d_aa.vec")  # fmt: skip
def _(a: Arguments) -> Read:
    return _along(a, "resize", range(2, a.rank()))


@row("pad", "constant_pad_nd")
def _(a: Arguments) -> Read | None:
    flat = list(a[1])
    if not all(isinstance(p, int) for p in flat):
        return None
    mode = a[2] if "pad.default" in str(a.node.target) else "constant"
    value = a[3] if "pad.default" in str(a.node.target) else a[2]
    pads = [(0, 0)] * a.rank()
    for i in range(len(flat) // 2):
        pads[a.rank() - 1 - i] = (flat[2 * i], flat[2 * i + 1])
    axes = [i for i, p in enumerate(pads) if p != (0, 0)]
    if any(p < 0 for p in flat):
        return _along(a, "slice" if all(p <= 0 for p in flat) else "crop", axes)
    if mode != "constant":
        return _along(a, "pad_edge", axes)
    return _along(a, "pad", axes, pads=tuple(pads), value=float(value or 0.0))


@row("flip", "roll")
def _(a: Arguments) -> Read:
    name = str(a.node.target).split(".")[1]
    return _along(a, name, a.dims(2 if name == "roll" else 1))


@row("select.int")
def _(a: Arguments) -> Read | None:
    axis, size = a.dims(1)[0], a.shape(0)[a.dims(1)[0]]
    if not isinstance(a[2], int):
        return _along(a, "gather", (axis,), drop=True)
    index = a[2] % size if isinstance(size, int) else a[2]
    return _along(a, "pick", (axis,), drop=True, index=index)


@row("gather")
def _(a: Arguments) -> Read | None:
    """x[i, index[i, j]], where index and x agree along the other axes."""
    axis = a.dims(1)[0]
    sizes = [(n, m) for d, (n, m) in enumerate(zip(a.shape(0), a.shape(2), strict=True)) if d != axis]
    return _along(a, "gather_elements", (axis,), 2) if all(n == m for n, m in sizes) else None


@row("repeat")
def _(a: Arguments) -> Read | None:
    times = tuple(n if isinstance(n, int) else str(n.meta["val"]) for n in a[1])
    axes = [d for d, n in enumerate(times) if n != 1]
    known = len(times) == a.rank() and all(isinstance(a.shape(0)[d], int) for d in axes)
    return _along(a, "tile", axes, times=times) if known else None


# ---------------------------------------------------------------- layout


@row("view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "squeeze", "squeeze.dim", "squeeze.dims",
     "unsqueeze", "view_as", "reshape_as")  # fmt: skip
def _(a: Arguments) -> Read:
    return Read("reshape", (0,))


@row("permute")
def _(a: Arguments) -> Read:
    return Read("transpose", (0,), {"perm": a.dims(1)})


@row("transpose.int", "swapaxes", "swapdims")
def _(a: Arguments) -> Read:
    perm = list(range(a.rank()))
    i, j = a.dims(1)[0], a.dims(2)[0]
    perm[i], perm[j] = perm[j], perm[i]
    return Read("transpose", (0,), {"perm": tuple(perm)})


@row("t", "numpy_T", "mT")
def _(a: Arguments) -> Read:
    perm = tuple(range(a.rank()))
    reverse = perm[::-1] if "mT" not in str(a.node.target) else (*perm[:-2], perm[-1], perm[-2])
    return Read("transpose", (0,), {"perm": reverse if a.rank() > 1 else perm})


@row("movedim.int", "movedim.intlist")
def _(a: Arguments) -> Read:
    source, target = a.dims(1), a.dims(2)
    rest = [d for d in range(a.rank()) if d not in source]
    perm: list[int] = [-1] * a.rank()
    for s, t in zip(source, target, strict=True):
        perm[t] = s
    for i in range(a.rank()):
        if perm[i] < 0:
            perm[i] = rest.pop(0)
    return Read("transpose", (0,), {"perm": tuple(perm)})


@row("cat", "concat")
def _(a: Arguments) -> Read:
    rank = len(a.out_shape())
    return Read("concat", tuple((0, i) for i in range(len(a[0]))), {"axis": int(a[1]) % rank})


@row("expand", "expand_as", "broadcast_to")
def _(a: Arguments) -> Read:
    return Read("expand", (0,))


@row("full")
def _(a: Arguments) -> Read | None:
    """A number at every position of a size: floats only, for whole numbers are positions and counts."""
    return Read("expand", (1,)) if a.node.meta["val"].dtype.is_floating_point else None


@row("slice.Tensor")
def _(a: Arguments) -> Read:
    axis = a.dims(1)[0]
    size, start, stop, step = a.shape(0)[axis], a[2], a[3], a[4]
    if start in (None, 0) and step == 1 and (stop is None or (isinstance(stop, int) and stop >= 2**62)):
        return Read("pointwise", (0,), {"fn": "identity"})
    if not all(isinstance(v, int) or v is None for v in (size, start, stop, step)):
        return _along(a, "slice", (axis,))
    keep = tuple(range(*slice(start, stop, step).indices(int(size))))
    return Read("select", (0,), {"axis": axis, "keep": keep}) if keep else _along(a, "slice", (axis,))


@row("narrow")
def _(a: Arguments) -> Read:
    axis = a.dims(1)[0]
    if not isinstance(a[2], int) or not isinstance(a[3], int) or not isinstance(a.shape(0)[axis], int):
        return _along(a, "slice", (axis,))
    start = a[2] % int(a.shape(0)[axis])
    return Read("select", (0,), {"axis": axis, "keep": tuple(range(start, start + a[3]))})


def _parts(axis: int, sizes: Sequence[int]) -> Read:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = tuple({"axis": axis, "keep": tuple(range(s, s + n))} for s, n in zip(starts, sizes, strict=True))
    return Read("select", (0,), parts=parts)


@row("split.Tensor", "split_with_sizes", "chunk", "split.sizes")
def _(a: Arguments) -> Read | None:
    name = str(a.node.target).split(".")[1]
    axis = a.dims(2)[0]
    size, how = a.shape(0)[axis], a[1]
    if not isinstance(size, int):
        return None
    if isinstance(how, (list, tuple)):
        sizes = [int(n) for n in how] if all(isinstance(n, int) for n in how) else []
    else:
        each = -(-size // int(how)) if name == "chunk" else int(how)
        sizes = [min(each, size - start) for start in range(0, size, each)]
    return _parts(axis, sizes) if sizes else None


@row("unbind.int")
def _(a: Arguments) -> Read | None:
    axis = a.dims(1)[0]
    size = a.shape(0)[axis]
    if not isinstance(size, int):
        return None
    parts = tuple({"fn": "pick", "axes": (axis,), "drop": True, "index": i} for i in range(size))
    return Read("along", (0,), parts=parts)


@row("sym_size.int")
def _(a: Arguments) -> Read:
    return Read("opaque", (0,), marks=Marks(shape_only=(a[1] % a.rank(),)))
