"""Seeded bugs of constant_fold: how affine ops take constants in, and how constants sink."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
CONSTANT = ("tests/passes/test_constant_fold.py", "tests/passes/test_runtime_stops.py")
AFFINE = "tests/passes/test_affine_fold.py"
RUNTIME = "tests/passes/test_runtime.py"
CONTRACT = "tests/passes/test_contract.py"

# ---------------------------------------------------------------- an affine op takes constants in

bug(
    "border-forgotten",
    "or isinstance(pad, str) or any(lo or hi for lo, hi in pad)",
    "or isinstance(pad, str)",
    "a zero-padded convolution is taken to see the constant beyond its border",
    *CONSTANT,
)
bug(
    "border-of-same-padding-forgotten",
    "or isinstance(pad, str) or any(lo or hi for lo, hi in pad)",
    "or (not isinstance(pad, str) and any(lo or hi for lo, hi in pad))",
    "auto_pad=SAME counts as no padding",
    *CONSTANT,
)
bug(
    "constants-twice",
    "total = add_tensors(bias, vector, alpha / beta, weight.dtype)",
    "total = add_tensors(bias, vector, 2 * alpha / beta, weight.dtype)",
    "the constants go into the bias twice",
    *CONSTANT,
)
bug(
    "gemm-beta-ignored",
    "total = add_tensors(bias, vector, alpha / beta, weight.dtype)",
    "total = add_tensors(bias, vector, alpha, weight.dtype)",
    "beta scales what was folded into the bias, which nobody divides by it",
    *CONSTANT,
)
bug(
    "alpha-of-an-added-bias-ignored",
    "add_after(sweep, smaller, add_tensors(None, vector, alpha, weight.dtype) if alpha != 1.0 else vector)",
    "add_after(sweep, smaller, vector)",
    "a product with alpha adds W c, not alpha W c",
    *CONSTANT,
)
bug(
    "old-bias-kept-beside-the-new",
    'smaller = node.with_inputs((sweep.select(x, attrs["axis"], keep), columns, bias_of(node)))',
    'smaller = node.with_inputs((sweep.select(x, attrs["axis"], keep), columns, None))',
    "the bias is lost where the constants are added behind the op",
    *CONSTANT,
)
bug(
    "mean-without-its-factor",
    "literal(len(keep) / size)",
    "literal(1.0)",
    "the mean over fewer units is not scaled by their share",
    *CONSTANT,
)
bug(
    "mean-divides-by-what-is-left",
    "/ (size if mean else 1)",
    "/ (len(keep) if mean else 1)",
    "the constants of a mean are divided by the number of units that stay",
    *CONSTANT,
)
bug(
    "norm-keeps-its-epsilon",
    'attrs = {**node.attrs, "eps": attributes(node, AlongAttrs)["eps"] * share}',
    "attrs = dict(node.attrs)",
    "an RMS norm over fewer units keeps epsilon as it was",
    *CONSTANT,
)
bug(
    "norm-scales-by-the-share",
    "_with_carriers(weight, keep, 0, math.sqrt(share))",
    "_with_carriers(weight, keep, 0, share)",
    "an RMS norm over fewer units is scaled by n/k, not by its root",
    *CONSTANT,
    "tests/passes/test_norms.py",
)
bug(
    "dilation-forgotten-in-a-shape",
    "        reach = d * (k - 1) + 1\n        sizes.append(",
    "        reach = k\n        sizes.append(",
    "the size of a dilated convolution's result",
    *CONSTANT,
    "tests/differential/test_differential.py",
    "-k",
    "dilat or conv or constant",
)
bug(
    "output-padding-forgotten-in-a-shape",
    "(n - 1) * s - lo - hi + reach + more if",
    "(n - 1) * s - lo - hi + reach if",
    "the size of a transposed convolution's result",
    *CONSTANT,
    "tests/differential/test_differential.py",
    "-k",
    "transposed or constant",
)
bug(
    "another-group-of-a-transposed-kernel",
    "seen[unit // per_in, 0] += c * w[unit]",
    "seen[unit % groups, 0] += c * w[unit]",
    "a constant channel is added to another group of a transposed convolution",
    *CONSTANT,
)
bug(
    "kernel-averaged",
    'bundle = apply("along", (bundle,), {"fn": "sum", "axes": over, "drop": True}, (outs, 1), bundle.dtype)',
    'bundle = apply("along", (bundle,), {"fn": "mean", "axes": over, "drop": True}, (outs, 1), bundle.dtype)',
    "the kernel positions are averaged, not summed",
    *CONSTANT,
)
bug(
    "table-of-sums-not-added",
    '    add_after(sweep, smaller, added.name)\n    return folded("constants into a table of sums")',
    '    sweep.emit(smaller)\n    return folded("constants into a table of sums")',
    "weights that are looked up forget the constants",
    *CONSTANT,
)
bug(
    "product-with-the-first-rows",
    "addend = _product(node, position, fact.at(gone), take(weight, inner[1 - position], gone))",
    "addend = _product(node, position, fact.at(gone), take(weight, inner[1 - position], range(len(gone))))",
    "constants of a product meet the first rows of the parameter, not their own",
    *CONSTANT,
)

# ---------------------------------------------------------------- attention

bug(
    "heads-interleaved",
    "[u * each + i for u in units for i in range(each)] if axis == heads else units",
    "[u + i * each for u in units for i in range(each)] if axis == heads else units",
    "a key-value head serves every n-th query head, not a run of them",
    *CONSTANT,
    "tests/structures/test_attention.py",
)
bug(
    "query-constants-dropped",
    "if position == 1 and fact.slab.shape[last - 1] == 1:",
    "if fact.slab.shape[last - 1] == 1:",
    "a constant query unit is dropped though it still affects the weights of the keys",
    *CONSTANT,
    CONTRACT,
)
bug(
    "mask-may-hide-every-key",
    "    if len(masks) > 1 or isinstance(masks[0], str) or node.inputs[3] is None or causal:\n        return False",
    "    if len(masks) > 1 or isinstance(masks[0], str) or node.inputs[3] is None or causal:\n        return True",
    "constants pass a mask that is known only at run time",
    *CONSTANT,
    CONTRACT,
)
bug(
    "softmax-over-any-axis",
    'and tuple(attributes(maker, AlongAttrs)["axes"]) == (len(maker.output.shape) - 1,)',
    "",
    "rows of a softmax over another axis are taken to sum to 1",
    *CONSTANT,
    CONTRACT,
)
bug(
    "scale-follows-the-width-that-is-left",
    "sweep.emit(node.with_inputs(inputs).with_marks(narrowed=True))",
    "sweep.emit(node.with_inputs(inputs))",
    "attention over fewer units computes its scale anew",
    *CONSTANT,
    "tests/structures/test_attention.py",
    "tests/structures/test_native.py",
)
bug(
    "zero-somewhere-is-zero",
    "~fact.slab.any(axis=others)",
    "~fact.slab.all(axis=others)",
    "a unit that is 0 at one position counts as 0 at all",
    *CONSTANT,
)

# ---------------------------------------------------------------- sums behind affine ops

bug(
    "merged-sum-forgets-alpha",
    'or attrs["fn"] != "add" or attrs.get("alpha", 1.0) != 1.0 or attrs.get("align"):',
    'or attrs["fn"] != "add" or attrs.get("align"):',
    "y + alpha p is merged as y + p",
    *CONSTANT,
)
bug(
    "batch-norm-weight-forgotten",
    "(tensor, weight or one, none, none, variance)",
    "(tensor, one, none, none, variance)",
    "a plane moved behind a batch norm is not scaled by gamma",
    *CONSTANT,
)
bug(
    "transposed-kernel-scaled-along-its-inputs",
    'scale(kernel, 1 if attributes(border_conv, ConvAttrs).get("transposed") else 0)',
    "scale(kernel, 0)",
    "the kernel of a transposed convolution has its outputs along axis 1",
    *CONSTANT,
    RUNTIME,
)

# ---------------------------------------------------------------- constants sink

bug(
    "zero-absorbs-a-sum",
    '    if attributes(node, PointwiseAttrs)["fn"] == "mul":\n        zeros = ',
    '    if attributes(node, PointwiseAttrs)["fn"] in ("mul", "add"):\n        zeros = ',
    "0 + y is taken to be 0",
    *CONSTANT,
)
bug(
    "zero-absorbs-a-maximum",
    'return attributes(node, PointwiseAttrs)["fn"] == "mul" and len(facts) == 1 and some',
    'return attributes(node, PointwiseAttrs)["fn"] in ("mul", "max") and len(facts) == 1 and some',
    "max(0, y) is taken to be 0",
    *CONSTANT,
)
bug(
    "zero-minus-x-is-x",
    '{"add": (0, 1), "sub": (0,)}.get(',
    '{"add": (0, 1), "sub": (0, 1)}.get(',
    "the sign of 0 - x is lost",
    *CONSTANT,
)
bug(
    "zero-plus-alpha-x-is-x",
    'scaled = position == 1 and attrs.get("alpha", 1.0) != 1.0',
    "scaled = False",
    "0 + alpha x becomes x",
    *CONSTANT,
)
bug(
    "broadcast-units-pass",
    '        return Declined("the replaced axis is broadcast here")\n    unknown = [str(o)',
    "        pass\n    unknown = [str(o)",
    "a single unit that is broadcast to many counts as one of them",
    *CONSTANT,
)
bug(
    "axis-kept-though-others-are-dropped",
    'axis = fact.axis - sum(a < fact.axis for a in axes) if attrs.get("drop") else fact.axis',
    "axis = fact.axis",
    "a reduction drops axes before the units, whose number stays",
    *CONSTANT,
)
bug(
    "padding-like-the-constant",
    'same_pad = fn == "pad" and bool(np.all(slab == attrs.get("value")))',
    'same_pad = fn == "pad"',
    "padding by 0 around a constant is taken to be that constant",
    *CONSTANT,
)
bug(
    "parameters-of-other-units",
    "local = None if operand is None else parameter_axis(node, i, operand.shape, fact.axis, rank)",
    "local = None if operand is None else parameter_axis(node, i, operand.shape, fact.axis + 1, rank)",
    "the weights of a norm are not those of the replaced units",
    *CONSTANT,
)
bug(
    "reshape-takes-constants-as-they-come",
    "slab = move_slab(before, after, fact.axis, units, moved, fact.at(units))",
    "slab = move_slab(before, after, fact.axis, units, moved, fact.full())",
    "units that are not named in ascending order get each other's constants",
    *CONSTANT,
)
bug(
    "transpose-the-other-way",
    "return sink(sweep, node, facts, perm.index(fact.axis), fact.units, np.transpose(fact.full(), perm))",
    "return sink(sweep, node, facts, perm[fact.axis], fact.units, np.transpose(fact.full(), perm))",
    "the permutation is applied in the wrong direction",
    *CONSTANT,
)
bug(
    "expand-forgets-leading-axes",
    "return sink(sweep, node, facts, fact.axis + lead, fact.units,",
    "return sink(sweep, node, facts, fact.axis, fact.units,",
    "an expand that adds axes in front moves the units",
    *CONSTANT,
)
bug(
    "concat-forgets-its-offset",
    "units += [offset + u for u in facts[i].units]",
    "units += list(facts[i].units)",
    "the units of the second part keep their numbers",
    *CONSTANT,
)
bug(
    "concat-takes-the-first-constants",
    "if all(s.shape[along] == 1 for s in slabs) and all(np.array_equal(s, slabs[0]) for s in slabs):",
    "if all(s.shape[along] == 1 for s in slabs):",
    "parts with different constants are all given those of the first",
    *CONSTANT,
)
bug(
    "selected-constants-in-reverse",
    "fact.at([u for _, u in left])",
    "fact.at([u for _, u in reversed(left)])",
    "a select hands the constants out in the wrong order",
    *CONSTANT,
)
bug(
    "two-dos-change-places",
    "slab = compress(join([fact.at(first), later.full()], axis), axis)",
    "slab = compress(join([later.full(), fact.at(first)], axis), axis)",
    "two replacements that become one mix up their constants",
    *CONSTANT,
)
bug(
    "constant-parents-forgotten",
    "added = np.moveaxis(seen @ constant(weight)[:, known].T, -1, axis)",
    "added = 0 * np.moveaxis(seen @ constant(weight)[:, known].T, -1, axis)",
    "constants that an affine replacement reads do not reach its bias",
    *CONSTANT,
    AFFINE,
)
bug(
    "bias-of-known-groups-forgotten",
    "shift = None if bias is None else constant(take(bias, 0, rows))",
    "shift = None",
    "groups of a convolution whose inputs are all known lose their bias",
    *CONSTANT,
)
bug(
    "not-finite-passes",
    "    if not np.isfinite(slab).all():\n        return Declined(NOT_FINITE)\n    inputs = list(node.inputs)",
    "    inputs = list(node.inputs)",
    "a constant that becomes infinite is folded",
    *CONSTANT,
)

# ---------------------------------------------------------------- constants known only at run time

bug(
    "bias-twice-at-run-time",
    "addend = twin(sweep, node, (fact.runtime, order, None), shape)",
    "addend = twin(sweep, node, (fact.runtime, order, bias), shape)",
    "the bias is in the product and in what is added to it",
    RUNTIME,
    *CONSTANT,
)
bug(
    "conv-bias-twice-at-run-time",
    "addend = twin(sweep, node, (v, conv_columns(weight, node, units), None), shape)",
    "addend = twin(sweep, node, (v, conv_columns(weight, node, units), bias), shape)",
    "the bias is in the convolution and in what is added to it",
    RUNTIME,
    *CONSTANT,
)
bug(
    "positions-in-reverse-at-run-time",
    "value = sweep.select(fact.runtime, axis, fact.positions([u for _, u in left]))",
    "value = sweep.select(fact.runtime, axis, fact.positions([u for _, u in reversed(left)]))",
    "a select hands the values known at run time out in the wrong order",
    RUNTIME,
    *CONSTANT,
)
bug(
    "offset-forgotten-at-run-time",
    "return sink(sweep, node, facts, fact.axis, [offset + u for u in fact.units], fact.runtime)",
    "return sink(sweep, node, facts, fact.axis, list(fact.units), fact.runtime)",
    "a concat moves units, and the value known at run time goes to the old ones",
    RUNTIME,
    *CONSTANT,
)
