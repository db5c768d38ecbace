"""Seeded bugs of the ONNX host: how nodes are read, written, inserted and named."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
HOST = (
    "tests/hosts/onnx/test_write.py",
    "tests/hosts/onnx/test_host.py",
    "tests/hosts/onnx/test_names.py",
    "tests/hosts/onnx/test_shapes.py",
)
ROWS = "tests/hosts/onnx/test_rows.py"
WRITE = "tests/hosts/onnx/test_write.py"
LINEAR = ("tests/differential/test_differential.py", "-k", "onnx and (gemm or matmul or linear or mlp)")
CONV = ("tests/differential/test_differential.py", "-k", "onnx and conv")

# ---------------------------------------------------------------- reading

bug(
    "gemm-transposed-the-wrong-way",
    '    w_in, w_out = (1, 0) if view.attr("transB", 0) else (0, 1)\n    attrs: dict[str, Any] = {"axis": 1',
    '    w_in, w_out = (0, 1) if view.attr("transB", 0) else (1, 0)\n    attrs: dict[str, Any] = {"axis": 1',
    "transB is read the wrong way round",
    ROWS,
    WRITE,
)
bug(
    "gemm-beta-not-read",
    '"beta": float(view.attr("beta", 1.0))',
    '"beta": 1.0',
    "beta of a Gemm is taken to be 1",
    ROWS,
    WRITE,
)
bug(
    "gemm-alpha-not-read",
    '{"alpha": float(view.attr("alpha", 1.0)), "beta"',
    '{"alpha": 1.0, "beta"',
    "alpha of a Gemm is taken to be 1",
    ROWS,
    WRITE,
)
bug(
    "trans-a-ignored",
    '    if view.attr("transA", 0):\n        raise LeftWhole("it transposes its input")\n    weight',
    "    weight",
    "a Gemm that transposes its input is read as one that does not",
    "tests/hosts/onnx/test_read.py",
)
bug(
    "pads-in-pairs",
    "return tuple(zip(pads[:rank], pads[rank:], strict=True))",
    "return tuple(zip(pads[::2], pads[1::2], strict=True))",
    "ONNX lists all starts before all ends",
    ROWS,
    *CONV,
)
bug(
    "softmax-over-one-axis-before-13",
    "axes = (axis,) if view.opset >= 13 else tuple(range(axis, rank))",
    "axes = (axis,)",
    "before opset 13 a softmax runs over all axes from its own on",
    ROWS,
)
bug(
    "batch-norm-epsilon-default",
    '"eps": float(view.attr("epsilon", 1e-5)), "align": (None, (1,), (1,), (1,), (1,))',
    '"eps": float(view.attr("epsilon", 1e-3)), "align": (None, (1,), (1,), (1,), (1,))',
    "the default of an attribute that is absent",
    ROWS,
)
bug(
    "batch-norm-along-the-last-axis",
    '"align": (None, (1,), (1,), (1,), (1,))}\n    return Step("pointwise", (0, 1, 2, 3, 4)',
    '"align": (None, *((len(view.shape()) - 1,),) * 4)}\n    return Step("pointwise", (0, 1, 2, 3, 4)',
    "the parameters of a batch norm are laid along the wrong axis",
    ROWS,
)
bug(
    "matmul-of-a-constant-along-the-last-axis",
    "axis = max(len(shape) - 2, 0) if x == 1 else len(shape) - 1",
    "axis = len(shape) - 1",
    "W x contracts the last axis but one of x",
    ROWS,
    *LINEAR,
)
bug(
    "gather-counts-from-the-front",
    "return select(view, axis, [int(i) % size for i in positions])",
    "return select(view, axis, [abs(int(i)) % size for i in positions])",
    "negative positions of a Gather",
    ROWS,
)
bug(
    "split-rounds-down",
    "        each = -(-size // parts)\n        sizes = tuple(min(each, size - i * each) for i in range(parts))",
    "        each = size // parts\n        sizes = (each,) * (parts - 1) + (size - each * (parts - 1),)",
    "a Split into unequal parts has the short one last",
    ROWS,
    *HOST,
)
bug(
    "average-never-counts-padding",
    'attrs["include_pad"] = bool(view.attr("count_include_pad", 0))',
    'attrs["include_pad"] = False',
    "count_include_pad is not read",
    ROWS,
)
bug(
    "window-larger-than-its-input",
    "if isinstance(size, int) and size + sum(pad) < dilation * (length - 1) + 1:",
    "if False:",
    "a window that does not fit even once is followed",
    *HOST,
    "tests/fuzz/test_fuzz.py",
    "-k",
    "window or once or degenerate or pool",
)
bug(
    "zero-in-a-shape-is-zero",
    'copied = n == 0 and not view.attr("allowzero", 0)',
    "copied = False",
    "0 in the shape of a Reshape copies an axis",
    ROWS,
    "tests/hosts/onnx/test_read.py",
)
bug(
    "skip-norm-epsilon",
    'float(view.attr("epsilon", 1e-12))',
    'float(view.attr("epsilon", 1e-5))',
    "the default epsilon of a fused norm",
    "tests/hosts/onnx/test_fused.py",
    "tests/hosts/onnx/test_forms.py",
)
bug(
    "packed-attention-scale",
    "w_in, w_out = (1, 0) if turned[1] else (0, 1)",
    "w_in, w_out = (0, 1) if turned[1] else (1, 0)",
    "a fused product that transposes its weight is read the wrong way round",
    "tests/hosts/onnx/test_fused.py",
    "tests/hosts/onnx/test_forms.py",
)

# ---------------------------------------------------------------- writing

bug(
    "groups-not-written",
    'onnx_node.attributes["group"] = onnx_ir.AttrInt64("group", attributes(nodes[0], ConvAttrs)["groups"])',
    "pass",
    "a grouped convolution that lost groups says its old number",
    ROWS,
)
bug(
    "key-value-heads-not-counted",
    "heads, served = attention.output.shape[1], patch.shape_of(attention.inputs[1])[1]",
    "heads, served = attention.output.shape[1], attention.output.shape[1]",
    "the number of key-value heads becomes that of query heads",
    "tests/hosts/onnx/test_fused.py",
    "tests/hosts/onnx/test_forms.py",
)
bug(
    "packed-sizes-not-written",
    '        if "qkv_hidden_sizes" in onnx_node.attributes or len(set(sizes)) > 1:',
    "        if False:",
    "packed attention keeps the sizes that it had",
    "tests/hosts/onnx/test_fused.py",
    "tests/hosts/onnx/test_forms.py",
)
bug(
    "squeeze-drops-what-has-one-unit-now",
    "axes = [i for i, n in enumerate(patch.was[str(before[0].inputs[0])]) if n == 1]",
    "axes = [i for i, n in enumerate(patch.shapes[str(nodes[0].inputs[0])]) if n == 1]",
    "an axis of which a single unit is left is squeezed away",
    WRITE,
)
bug(
    "slice-ends-too-early",
    "for n in (keep[0], keep[-1] + 1, axis, step)]",
    "for n in (keep[0], keep[-1], axis, step)]",
    "the end of a Slice is exclusive",
    WRITE,
    "tests/hosts/onnx/test_insert.py",
)
bug(
    "irregular-positions-as-a-slice",
    "regular = step > 0 and keep == list(range(keep[0], keep[-1] + 1, step))",
    "regular = step > 0",
    "positions with gaps become a Slice",
    WRITE,
    ROWS,
)
bug(
    "stale-shapes-stay",
    "            value.shape = onnx_ir.Shape([new if old != new else declared for declared, old, new in dims])",
    "            pass",
    "declared shapes stay what they were",
    WRITE,
)
bug(
    "sizes-follow-what-shrank",
    '        value.replace_all_uses_with(patch.array(fixed.tensor.array, base=""))',
    "        continue",
    "sizes that were read from a value which is smaller now",
    "tests/hosts/onnx/test_shapes.py",
)
bug(
    "output-under-another-name",
    "returned.name, returned.type, returned.shape = old, declared.type, declared.shape",
    "returned.type, returned.shape = declared.type, declared.shape",
    "an output of the model is renamed",
    WRITE,
    *HOST,
)
bug(
    "names-taken-twice",
    "        if name and free and forms[name] == 1:",
    "        if name and free:",
    "two forms of a shared weight take the same name",
    WRITE,
    *HOST,
)
bug(
    "name-of-a-parameter-that-stays",
    "free = name not in left and (name in patch.values or name not in patch.taken)",
    "free = True",
    "a changed tensor takes the name of a shared one that others still read",
    WRITE,
    *HOST,
)
bug(
    "shared-initializer-edited",
    "        if isinstance(tensor, Leaf) and tensor.dtype == dtype and tensor.name in self.values:",
    "        if parameter(tensor) in self.values and self.values[parameter(tensor)].shape == onnx_ir.Shape(tensor.shape):",
    "a folded bias is not stored: its readers go on reading the shared one",
    WRITE,
    ROWS,
)
bug(
    "another-precision-than-the-old-operand",
    "            value = patch.value(operand, patch.dtype_of(old))",
    '            value = patch.value(operand, "float32")',
    "the parameters of a half precision model become single precision",
    *HOST,
    "tests/differential/test_differential.py",
    "-k",
    "float16 or half or fp16",
)
bug(
    "unused-initializers-stay",
    "        if name not in kept and value in used and not value.uses() and not value.is_graph_output():",
    "        if False:",
    "parameters that nobody reads any more stay in the file",
    WRITE,
    *HOST,
)
bug(
    "defaults-of-inputs-dropped",
    "        if name not in kept and value in used and not value.uses()",
    "        if value in used and not value.uses()",
    "an input with a default vanishes from the model",
    "tests/hosts/onnx/test_load.py",
    "-k",
    "default",
)

# ---------------------------------------------------------------- nodes that are put in

bug(
    "clamp-takes-the-other",
    '    return patch.insert("Where", [patch.array(mask), constants, x], output)',
    '    return patch.insert("Where", [patch.array(mask), x, constants], output)',
    "a replacement that stays clamps the units that should stay",
    "tests/hosts/onnx/test_insert.py",
)
bug(
    "rebuilt-units-in-the-first-places",
    "    places[np.asarray(units)[order]] = size + np.arange(len(units))",
    "    places[: len(units)] = size + order",
    "rebuilt units are put in the first places",
    "tests/hosts/onnx/test_insert.py",
)
bug(
    "rebuilt-without-its-bias",
    '    rebuilt = patch.insert("Add", [rebuilt, patch.initializer(ArrayLiteral(shift), dtype=dtype)], f"{name}.rebuilt")\n',
    "",
    "an affine replacement that stays loses its bias",
    "tests/hosts/onnx/test_insert.py",
)
bug(
    "values-spread-in-sorted-order",
    'index[list(attributes(node, DoAttrs)["units"])] = np.arange(len(attributes(node, DoAttrs)["units"]))',
    'index[sorted(attributes(node, DoAttrs)["units"])] = np.arange(len(attributes(node, DoAttrs)["units"]))',
    "values known only at run time go to other units",
    "tests/hosts/onnx/test_insert.py",
)
bug(
    "inserted-pads-in-pairs",
    '[p[0] for p in attrs["pad"]] + [p[1] for p in attrs["pad"]]',
    '[n for p in attrs["pad"] for n in p]',
    "the padding of an inserted convolution",
    "tests/passes/test_runtime.py",
    *CONV,
)
bug(
    "plane-of-the-whole-size",
    'size = _sizes_from(patch, node, (1,) * first, "size")',
    'size = _sizes_from(patch, node, (2,) * first, "size")',
    "a plane of ones has a batch of two",
    *CONV,
)
