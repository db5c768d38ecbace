"""The nodes that the compiler itself puts into an ONNX model: do, turn, select, a sum, a plane of ones, its convolution.

A `do` that is still there runs literally (`insert_do.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir

from cmrc.errors import HostError
from cmrc.hosts.onnx.insert_do import cast, insert_do, insert_turn, integers, source_of
from cmrc.hosts.onnx.nodes import data_type, dtype_name
from cmrc.hosts.onnx.ops.writers import selection
from cmrc.hosts.onnx.patch import ModelPatch
from cmrc.ir.graph import Apply, Leaf, Node, Tensor, Value, apply, attributes, numpy_dtype
from cmrc.ir.ops.affine import ConvAttrs, SelectAttrs
from cmrc.ir.ops.functions import AlongAttrs, PointwiseAttrs
from cmrc.ir.ops.group_norm import sums_of
from cmrc.ir.spec import AxisAttrs, FunctionAttrs


def insert_like(patch: ModelPatch, node: Node) -> None:
    """A copy of a node of the model on other operands."""
    like = node.marks.like
    onnx_node = patch.values[like].producer()
    assert onnx_node is not None
    if node.op == "reshape":  # the copy has a batch of one, which the model's own sizes do not say
        sizes = integers(patch, *(n if isinstance(n, int) else -1 for n in node.output.shape))
        patch.insert("Reshape", [source_of(patch, node), sizes], node.output)
        return
    inputs = list(onnx_node.inputs)
    for slot, operand in zip(patch.reading.slots[like], node.inputs, strict=False):
        assert isinstance(slot, int)  # a part of a fused node is never copied
        inputs += [None] * (slot + 1 - len(inputs))
        there = inputs[slot]
        declared = None if there is None else there.dtype
        own = operand.dtype if isinstance(operand, Leaf | Apply) and there is not None else node.output.dtype
        dtype = own if declared is None else dtype_name(declared)
        inputs[slot] = patch.value(operand, dtype)
    while inputs and inputs[-1] is None:
        inputs.pop()
    given = [a for a in onnx_node.attributes.values() if not (node.op == "conv" and a.name == "group")]
    if node.op == "conv":
        given.append(onnx_ir.AttrInt64("group", attributes(node, ConvAttrs)["groups"]))
    among = (patch.values[like].index() or 0, len(onnx_node.outputs))
    patch.insert(onnx_node.op_type, inputs, node.output, given, domain=onnx_node.domain, among=among)


def insert_select(patch: ModelPatch, node: Node) -> None:
    if "period" in node.attrs:
        _insert_periodic(patch, node)
        return
    op, inputs, given = selection(patch, node)
    patch.insert(op, inputs, node.output, given)


def _insert_periodic(patch: ModelPatch, node: Node) -> None:
    """The same positions of every run of `period`: the axis is split in two, and joined again."""
    x, axis, rank = source_of(patch, node), attributes(node, AxisAttrs)["axis"], len(node.output.shape)
    sizes = patch.insert("Shape", [x], f"{node.name}.shape")
    lead = patch.insert("Gather", [sizes, integers(patch, *range(axis))], f"{node.name}.lead")
    rest = patch.insert("Gather", [sizes, integers(patch, *range(axis + 1, rank))], f"{node.name}.rest")
    first, inner = [onnx_ir.AttrInt64("axis", 0)], [onnx_ir.AttrInt64("axis", axis + 1)]
    target = patch.insert(
        "Concat", [lead, integers(patch, -1, attributes(node, SelectAttrs)["period"]), rest], f"{node.name}.runs", first
    )
    runs = patch.insert("Reshape", [x, target], f"{node.name}.split")
    taken = patch.insert(
        "Gather", [runs, integers(patch, *attributes(node, SelectAttrs)["keep"])], f"{node.name}.taken", inner
    )
    target = patch.insert("Concat", [lead, integers(patch, -1), rest], f"{node.name}.size", first)
    patch.insert("Reshape", [taken, target], node.output)


def insert_pointwise(patch: ModelPatch, node: Node) -> None:
    attrs = attributes(node, PointwiseAttrs)
    if attrs["fn"] == "cast":
        cast(patch, source_of(patch, node), data_type(attrs["dtype"]), node.output)
        return
    op = OPS.get(attrs["fn"])
    if op is None or (op == "Add" and attrs.get("alpha", 1.0) != 1.0) or attrs.get("align"):
        raise HostError(f"cannot insert a new {node.kind} node", node=node.label, op=node.kind)
    maker = patch.makers.get(str(node.inputs[0])) if node.marks.addend else None
    values: list[onnx_ir.Value | None] = []
    for operand in node.inputs:
        if isinstance(operand, Tensor):
            is_vector = sum(n != 1 for n in operand.shape) <= 1
            named = "" if maker is None else patch.bias_name(maker, "bias" if is_vector else "border")
            if len(operand.shape) == 1 and maker is not None and _is_misread_as_gemm(patch, maker):
                shape = (1, *operand.shape)
                operand = apply("reshape", (operand,), {"shape": shape}, shape, operand.dtype)
            values.append(patch.initializer(operand, dtype=node.output.dtype, base=named))
        else:
            values.append(patch.value(operand, node.output.dtype))
    if op == "Clip" and patch.opset >= 11:  # its bounds are inputs
        bounds = [np.asarray(bound, dtype=numpy_dtype(node.output.dtype)) for bound in (attrs["min"], attrs["max"])]
        patch.insert(op, [*values, *(patch.array(bound) for bound in bounds)], node.output)
        return
    numbers = {"alpha": attrs.get("alpha"), "beta": attrs.get("beta"), "min": attrs.get("min"), "max": attrs.get("max")}
    given = [onnx_ir.AttrFloat32(name, number) for name, number in numbers.items() if number is not None]
    patch.insert(op, values, node.output, given)


def _is_misread_as_gemm(patch: ModelPatch, maker: Node) -> bool:
    """Whether onnxruntime could not load the model if a vector were added to this product.

    It makes one Gemm of both (onnxruntime 1.31). From opset 21 on it quantises in front of it once more, as uint8 also what is int8,
    if there are three axes or more; before opset 11 it rounds the sum by an op that is not there yet.
    """
    x = maker.inputs[0]
    source = patch.values[x].producer() if isinstance(x, str) and x in patch.values else None
    if maker.op != "linear" or source is None or source.op_type != "DequantizeLinear":
        return False
    unsigned = source.inputs[0].dtype == onnx_ir.DataType.UINT8  # type: ignore[union-attr]
    return patch.opset < 11 or (patch.opset >= 21 and len(maker.output.shape) > 2 and not unsigned)


OPS = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "identity": "Identity",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "leaky_relu": "LeakyRelu",
    "hard_sigmoid": "HardSigmoid",
    "clip": "Clip",
}


def insert_plane(patch: ModelPatch, node: Node) -> None:
    """Ones of the spatial size that the value has when the model runs; of a fixed size, a runtime makes them when it loads it."""
    one = onnx_ir.AttrTensor("value", onnx_ir.tensor(np.ones(1, dtype=numpy_dtype(node.output.dtype))))
    if all(isinstance(n, int) for n in node.output.shape):
        patch.insert("ConstantOfShape", [integers(patch, *(int(n) for n in node.output.shape))], node.output, [one])
        return
    first = attributes(node, AxisAttrs)["axis"] + 1
    size = _sizes_from(patch, node, (1,) * first, "size")
    patch.insert("ConstantOfShape", [size], node.output, [one])


def _sizes_from(patch: ModelPatch, node: Node, lead: tuple[int, ...], name: str) -> onnx_ir.Value:
    """These sizes, then those of the node's operand behind them."""
    first, shape = len(lead), patch.shapes[str(node.inputs[0])]
    if all(isinstance(n, int) for n in shape[first:]):
        return integers(patch, *lead, *(int(n) for n in shape[first:]))
    sizes = patch.insert("Shape", [source_of(patch, node)], f"{node.name}.{name}.shape")
    if patch.opset >= 10:
        bounds = [integers(patch, n) for n in (first, len(shape))]
        rest = patch.insert("Slice", [sizes, *bounds], f"{node.name}.{name}.rest")
    else:
        given = [onnx_ir.AttrInt64s("starts", [first]), onnx_ir.AttrInt64s("ends", [len(shape)])]
        rest = patch.insert("Slice", [sizes], f"{node.name}.{name}.rest", given)
    return patch.insert("Concat", [integers(patch, *lead), rest], f"{node.name}.{name}", [onnx_ir.AttrInt64("axis", 0)])


def insert_conv(patch: ModelPatch, node: Node) -> None:
    attrs, weight = node.attrs, node.inputs[1]
    assert isinstance(weight, Tensor)
    given = [
        onnx_ir.AttrInt64("group", attrs["groups"]),
        onnx_ir.AttrInt64s("kernel_shape", list(weight.shape[2:])),
        onnx_ir.AttrInt64s("strides", list(attrs["stride"])),
        onnx_ir.AttrInt64s("dilations", list(attrs["dilation"])),
    ]
    if isinstance(attrs["pad"], str):
        given.append(onnx_ir.AttrString("auto_pad", attrs["pad"].upper()))
    else:
        given.append(onnx_ir.AttrInt64s("pads", [p[0] for p in attrs["pad"]] + [p[1] for p in attrs["pad"]]))
    if attrs.get("transposed"):
        given.append(onnx_ir.AttrInt64s("output_padding", list(attrs["output_padding"])))
    inputs = [
        source_of(patch, node),
        patch.initializer(
            weight, dtype=node.output.dtype, base="" if node.origin else f"{node.path or node.name}.kernel"
        ),
    ]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        inputs.append(patch.value(bias, node.output.dtype) or inputs[0])
    patch.insert("ConvTranspose" if attrs.get("transposed") else "Conv", inputs, node.output, given)


def insert_linear(patch: ModelPatch, node: Node) -> None:
    """A product with a matrix, along the last axis."""
    attrs, weight = node.attrs, node.inputs[1]
    assert isinstance(weight, Tensor)
    if attrs["w_in"]:
        weight = apply("transpose", (weight,), {"perm": (1, 0)}, weight.shape[::-1], weight.dtype)
    columns = patch.initializer(weight, dtype=node.output.dtype, base=patch.bias_name(node, "columns"))
    patch.insert("MatMul", [source_of(patch, node), columns], node.output)


def insert_along(patch: ModelPatch, node: Node) -> None:
    insert = ALONG.get(attributes(node, FunctionAttrs)["fn"])
    if insert is None:
        raise HostError(f"cannot insert a new {node.kind} node", node=node.label, op=node.kind)
    insert(patch, node)


NORMS = {
    "layer_norm": ("LayerNormalization", 17),
    "rms_norm": ("RMSNormalization", 23),
}  # and the opset that brought it


def _insert_norm(patch: ModelPatch, node: Node) -> None:
    """A normalisation: one op where ONNX has it, else spelled out, in float32 at least as the op does."""
    op, since = NORMS[attributes(node, FunctionAttrs)["fn"]]
    axes, rank, dtype = attributes(node, AlongAttrs)["axes"], len(node.output.shape), node.output.dtype
    eps = attributes(node, AlongAttrs)["eps"]
    if patch.opset >= since and axes == tuple(range(min(axes), rank)) and _fits_attribute(eps, dtype):
        inputs = [source_of(patch, node), *(patch.value(operand, dtype) for operand in node.inputs[1:])]
        epsilon = onnx_ir.AttrFloat32("epsilon", eps)
        patch.insert(op, inputs, node.output, [onnx_ir.AttrInt64("axis", min(axes)), epsilon])
        return
    narrow = dtype in ("float16", "bfloat16")
    wide = "float32" if narrow else dtype
    x = source_of(patch, node)
    if not narrow:
        _spell_out_norm(patch, node, x, wide, node.output)
        return
    x = cast(patch, x, data_type(wide), f"{node.name}.wide")
    cast(patch, _spell_out_norm(patch, node, x, wide, f"{node.name}.scaled"), data_type(dtype), node.output)


def _fits_attribute(number: float, dtype: str) -> bool:
    """Whether an attribute, which is a float32, says a number as exactly as a tensor of this type."""
    return dtype != "float64" or float(np.float32(number)) == number


def _spell_out_norm(patch: ModelPatch, node: Node, x: onnx_ir.Value, dtype: str, output: Value | str) -> onnx_ir.Value:
    """(x − mean) / √(mean (x − mean)² + ε) · w + b; an RMS norm without the mean and b."""
    axes, name = attributes(node, AlongAttrs)["axes"], node.name
    if attributes(node, FunctionAttrs)["fn"] == "layer_norm":
        x = patch.insert("Sub", [x, _mean(patch, x, axes, f"{name}.mean")], f"{name}.centred")
    square = patch.insert("Mul", [x, x], f"{name}.square")
    eps = patch.array(np.asarray(attributes(node, AlongAttrs)["eps"], dtype=numpy_dtype(dtype)))
    shifted = patch.insert("Add", [_mean(patch, square, axes, f"{name}.variance"), eps], f"{name}.shifted")
    root = patch.insert("Sqrt", [shifted], f"{name}.root")
    return _in_steps(patch, node, x, [("Div", [root])], dtype, output)


def _in_steps(
    patch: ModelPatch,
    node: Node,
    x: onnx_ir.Value,
    steps: list[tuple[str, list[onnx_ir.Value]]],
    dtype: str,
    output: Value | str,
) -> onnx_ir.Value:
    """x through these ops, then times the weight of a norm and plus its bias."""
    axis, rank = min(attributes(node, AlongAttrs)["axes"]), len(node.output.shape)
    for op, parameter in zip(("Mul", "Add"), node.inputs[1:], strict=False):
        if isinstance(parameter, Tensor):
            if len(parameter.shape) == 1 and axis != rank - 1:
                shape = (*parameter.shape, *(1,) * (rank - axis - 1))
                parameter = apply("reshape", (parameter,), {"shape": shape}, shape, parameter.dtype)
            steps.append((op, [patch.initializer(parameter, dtype=dtype)]))
    for i, (op, others) in enumerate(steps):
        given = [onnx_ir.AttrInt64("axis", axis)] if op == "Concat" else []
        x = patch.insert(op, [x, *others], output if i == len(steps) - 1 else f"{node.name}.{op.lower()}", given)
    return x


def _insert_group_norm(patch: ModelPatch, node: Node) -> None:
    """As an instance norm of groups, the way torch writes it."""
    attrs, dtype = attributes(node, AlongAttrs), node.output.dtype
    rows = patch.insert(
        "Reshape", [source_of(patch, node), integers(patch, 0, attrs["groups"], -1)], f"{node.name}.groups"
    )
    neutral = [patch.array(np.full(attrs["groups"], n, numpy_dtype(dtype))) for n in (1.0, 0.0)]
    eps = onnx_ir.AttrFloat32("epsilon", attrs["eps"])
    normal = patch.insert("InstanceNormalization", [rows, *neutral], f"{node.name}.normal", [eps])
    units = int(patch.shapes[str(node.inputs[0])][1])
    sizes = _sizes_from(patch, node, (0, units), "sizes")
    _in_steps(patch, node, normal, [("Reshape", [sizes])], dtype, node.output)


def _insert_known_group_norm(patch: ModelPatch, node: Node) -> None:
    """A group norm of which some units are known (`ir/ops/group_norm.py`), in float32 at least. Groups are [batch, groups, 1]."""
    dtype, name, rank = node.output.dtype, node.name, len(node.output.shape)
    narrow = dtype in ("float16", "bfloat16")
    wide = "float32" if narrow else dtype
    sums, over, x = sums_of(attributes(node, AlongAttrs)), tuple(range(2, rank)), source_of(patch, node)
    x = cast(patch, x, data_type(wide), f"{name}.wide") if narrow else x
    (groups, most), units, along = sums.places.shape, len(sums.group_of), [onnx_ir.AttrInt64("axis", 1)]

    def numbers(array: np.ndarray) -> onnx_ir.Value:
        return patch.array(array.astype(numpy_dtype(wide)))

    def shaped(values: onnx_ir.Value, tag: str, *sizes: int) -> onnx_ir.Value:
        return patch.insert("Reshape", [values, integers(patch, 0, *sizes)], f"{name}.{tag}")

    def over_groups(values: onnx_ir.Value, tag: str) -> onnx_ir.Value:
        means = _mean(patch, values, over, f"{name}.{tag}.units") if over else values
        if not sums.alike:
            rows = shaped(means, f"{tag}.row", units)
            means = patch.insert(
                "Gather", [rows, integers(patch, *sums.places.reshape(-1))], f"{name}.{tag}.placed", along
            )
        parts = shaped(means, f"{tag}.groups", groups, most)
        if sums.alike:
            return patch.insert(
                "Mul", [_mean(patch, parts, (2,), f"{name}.{tag}.mean"), numbers(sums.shares[0, 0])], f"{name}.{tag}"
            )
        weighed = patch.insert("Mul", [parts, numbers(sums.shares)], f"{name}.{tag}.weighed")
        return _mean(patch, weighed, (2,), f"{name}.{tag}")

    def by_unit(values: onnx_ir.Value, tag: str) -> onnx_ir.Value:
        if groups > 1:
            values = patch.insert("Gather", [values, integers(patch, *sums.group_of)], f"{name}.{tag}.spread", along)
        return shaped(values, f"{tag}.by_unit", units if groups > 1 else 1, *(1,) * len(over))

    shift, share, more, centre = (numbers(row[:, None]) for row in sums.constants)
    mean = patch.insert("Add", [over_groups(x, "part"), shift], f"{name}.mean")
    centred = patch.insert("Sub", [x, by_unit(mean, "mean")], f"{name}.centred")
    distance = patch.insert("Sub", [centre, mean], f"{name}.distance")
    known = patch.insert("Mul", [patch.insert("Mul", [distance, distance], f"{name}.squared"), share], f"{name}.known")
    left = over_groups(patch.insert("Mul", [centred, centred], f"{name}.square"), "squares")
    both = patch.insert("Add", [patch.insert("Add", [left, known], f"{name}.variance"), more], f"{name}.shifted")
    root = patch.insert("Sqrt", [both], f"{name}.root")
    parts = [(patch.insert("Div", [distance, root], f"{name}.moved"), sums.shifted, "carriers")]
    if sums.spread:
        parts.append((patch.insert("Reciprocal", [root], f"{name}.inverse"), sums.spread, "scales"))
    some = [patch.insert("Gather", [value, integers(patch, *own)], f"{name}.{tag}", along) for value, own, tag in parts]
    carriers = some[0] if len(some) == 1 else patch.insert("Concat", some, f"{name}.numbers", along)
    carriers = shaped(carriers, "flat", len(sums.shifted) + len(sums.spread), *(1,) * len(over))
    if over:
        carriers = patch.insert("Expand", [carriers, _sizes_from(patch, node, (1, 1), "plane")], f"{name}.planes")
    normal = patch.insert("Div", [centred, by_unit(root, "root")], f"{name}.normal")
    steps = [("Concat", [carriers])]
    if not narrow:
        _in_steps(patch, node, normal, steps, wide, node.output)
        return
    cast(patch, _in_steps(patch, node, normal, steps, wide, f"{name}.scaled"), data_type(dtype), node.output)


def _insert_mean(patch: ModelPatch, node: Node) -> None:
    _mean(patch, source_of(patch, node), attributes(node, AlongAttrs)["axes"], node.output)


AXES_INPUT_SINCE = 18


def _mean(patch: ModelPatch, x: onnx_ir.Value, axes: tuple[int, ...], output: Value | str) -> onnx_ir.Value:
    if patch.opset >= AXES_INPUT_SINCE:
        return patch.insert("ReduceMean", [x, integers(patch, *axes)], output)
    return patch.insert("ReduceMean", [x], output, [onnx_ir.AttrInt64s("axes", list(axes))])


def _insert_pad(patch: ModelPatch, node: Node) -> None:
    pads = [pad[side] for side in (0, 1) for pad in attributes(node, AlongAttrs)["pads"]]
    value = attributes(node, AlongAttrs)["value"]
    if patch.opset >= 11:
        number = patch.array(np.asarray(value, dtype=numpy_dtype(node.output.dtype)))
        patch.insert("Pad", [source_of(patch, node), integers(patch, *pads), number], node.output)
        return
    if not _fits_attribute(value, node.output.dtype):
        raise HostError(
            f"a Pad of opset {patch.opset} holds its value {value:.6g} as a float32 only, which would round this float64",
            node=node.label,
            op="Pad",
            fix="convert the model to opset 11 or newer (onnx.version_converter), or replace these units by 0",
        )
    given = [onnx_ir.AttrInt64s("pads", pads), onnx_ir.AttrFloat32("value", value)]
    patch.insert("Pad", [source_of(patch, node)], node.output, given)


ALONG = {
    "layer_norm": _insert_norm,
    "rms_norm": _insert_norm,
    "group_norm": _insert_group_norm,
    "known_group_norm": _insert_known_group_norm,
    "mean": _insert_mean,
    "pad": _insert_pad,
}


def insert_concat(patch: ModelPatch, node: Node) -> None:
    values = [patch.value(operand, node.output.dtype) for operand in node.inputs]
    patch.insert("Concat", values, node.output, [onnx_ir.AttrInt64("axis", attributes(node, AxisAttrs)["axis"])])


INSERTED: dict[str, Callable[[ModelPatch, Node], None]] = {
    "do": insert_do,
    "select": insert_select,
    "pointwise": insert_pointwise,
    "along": insert_along,
    "concat": insert_concat,
    "plane": insert_plane,
    "conv": insert_conv,
    "linear": insert_linear,
    "turn": insert_turn,
}
