"""Rows of ops that work element by element, with broadcasting."""

from __future__ import annotations

from typing import Any

from cmrc.hosts.fx.ops.row import Barrier, Read, Row, row
from cmrc.hosts.fx.schema import Arguments, opname

# The argument of each op that says whether the model trains; export bakes it in as a number.
TRAINING_FLAGS = {"dropout": "train", "feature_dropout": "train", "alpha_dropout": "train", "batch_norm": "training"}


def pointwise(fn: str, *args: int, **attrs: Any) -> Row:
    return lambda _: Read("pointwise", args or (0,), {"fn": fn, **attrs})


for _name in ("relu", "silu", "sigmoid", "tanh", "mish", "erf", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt",
              "reciprocal", "abs", "neg", "sin", "cos", "atan", "sign", "floor", "ceil", "square", "selu"):  # fmt: skip
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
row("max.other")(pointwise("max", 0, 1))
row("min.other")(pointwise("min", 0, 1))
row("clone", "contiguous", "detach", "detach_", "alias", "lift_fresh_copy", "native_dropout")(pointwise("identity"))
row("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")(pointwise("where", 0, 1, 2))
row("masked_fill.Scalar", "masked_fill.Tensor")(pointwise("where", 1, 2, 0))
row("relu6")(pointwise("clip", min=0.0, max=6.0))


@row("dropout", "feature_dropout", "alpha_dropout")
def read_dropout(a: Arguments) -> Read | Barrier:
    if a["train"]:
        return Barrier("it drops at random: trace the model in eval mode")
    return Read("pointwise", (0,), {"fn": "identity"})


@row("prelu")
def read_prelu(a: Arguments) -> Read:
    return Read("pointwise", (0, 1), {"fn": "prelu", "align": (None, (min(1, a.rank() - 1),))})


@row("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Tensor", "rsub.Scalar")
def read_sum(a: Arguments) -> Read:
    """self ± alpha · other."""
    scaled = {"alpha": float(a["alpha"])} if a["alpha"] != 1 else {}
    return Read("pointwise", (0, 1), {"fn": opname(a.node), **scaled})


@row("addcmul")
def read_addcmul(a: Arguments) -> Read:
    scaled = {"value": float(a["value"])} if a["value"] != 1 else {}
    return Read("pointwise", (0, 1, 2), {"fn": "addcmul", **scaled})


@row("clamp", "clamp_min", "clamp_max")
def read_clamp(a: Arguments) -> Read:
    bounds = {name: float(a[name]) for name in ("min", "max") if a.get(name) is not None}
    return Read("pointwise", (0,), {"fn": "clip", **bounds})


@row("hardtanh")
def read_hardtanh(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "clip", "min": float(a["min_val"]), "max": float(a["max_val"])})


@row("leaky_relu")
def read_leaky_relu(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "leaky_relu", "alpha": float(a["negative_slope"])})


@row("elu")
def read_elu(a: Arguments) -> Read:
    factors = {"alpha": float(a["alpha"]), "gamma": float(a["scale"]), "input_scale": float(a["input_scale"])}
    return Read("pointwise", (0,), {"fn": "elu", **factors})


@row("celu")
def read_celu(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "celu", "alpha": float(a["alpha"])})


@row("gelu")
def read_gelu(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "gelu_tanh" if a["approximate"] == "tanh" else "gelu"})


@row("softplus")
def read_softplus(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "softplus", "beta": float(a["beta"]), "threshold": float(a["threshold"])})


@row("softshrink")
def read_softshrink(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "shrink", "lambd": float(a["lambd"]), "bias": float(a["lambd"])})


@row("hardshrink")
def read_hardshrink(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "shrink", "lambd": float(a["lambd"]), "bias": 0.0})


@row("threshold")
def read_threshold(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "threshold", "threshold": float(a["threshold"]), "value": float(a["value"])})


@row("to.dtype", "to.dtype_layout", "to.other", "_to_copy", "type_as", "to.device")
def read_cast(a: Arguments) -> Read:
    return Read("pointwise", (0,), {"fn": "cast", "dtype": str(a.node.meta["val"].dtype).removeprefix("torch.")})


@row("zeros_like", "ones_like", "full_like")
def read_fill(a: Arguments) -> Read | None:
    """A number at every position of a value, as a scan begins: it has the units of the value, and needs none of its numbers."""
    value = {"zeros_like": 0.0, "ones_like": 1.0}.get(opname(a.node), a.get("fill_value"))
    if not isinstance(value, (int, float)) or not a.node.meta["val"].dtype.is_floating_point:
        return None
    return Read("pointwise", (0,), {"fn": "fill", "value": float(value)})


@row("batch_norm")
def read_batch_norm(a: Arguments) -> Read | Barrier:
    if a["training"]:
        return Barrier("it uses the statistics of the batch: trace the model in eval mode")
    align = (None, *((min(1, a.rank() - 1),),) * 4)
    return Read("pointwise", (0, 1, 2, 3, 4), {"fn": "batch_norm", "eps": float(a["eps"]), "align": align})
