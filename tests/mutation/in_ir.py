"""Seeded bugs of the IR: what ops mean, where units go, what a graph costs, and which model it is."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
OPS = ("tests/ir/test_ops.py", "tests/ir/test_windows.py")
POINTWISE = ("tests/differential/test_differential.py", "-k", "pointwise")

bug(
    "linear-without-beta",
    "y + beta * aligned(bias.reshape(-1), (axis,), y.ndim)",
    "y + aligned(bias.reshape(-1), (axis,), y.ndim)",
    "beta of a Gemm does not scale its bias",
    *OPS,
)
bug(
    "same-padding-at-the-other-end",
    'pads.append((small, large) if pad == "same_upper" else (large, small))',
    'pads.append((large, small) if pad == "same_upper" else (small, large))',
    "SAME_UPPER and SAME_LOWER are mixed up",
    *OPS,
    "tests/passes/test_constant_fold.py",
)
bug(
    "padding-counts-in-an-average",
    '    if attrs.get("include_pad"):  # the declared',
    '    if not attrs.get("include_pad"):  # the declared',
    "an average pooling counts positions of the padding where it must not",
    *OPS,
)
bug(
    "window-beyond-the-end",
    "    return count - 1 if (count - 1) * stride >= size + pad[0] else count",
    "    return count",
    "in ceil mode a window may start in the padding",
    *OPS,
)
bug("tanh-gelu-misspelt", "0.044715 * x**3", "0.44715 * x**3", "a constant of the approximate gelu", *OPS)
bug(
    "batch-norm-epsilon-outside-the-root",
    "y = (x - mean) / np.sqrt(var + eps)",
    "y = (x - mean) / (np.sqrt(var) + eps)",
    "epsilon is added to the deviation, not to the variance",
    *OPS,
)
bug(
    "rsub-is-sub",
    '"rsub": Function(lambda x, y, alpha=1.0: y - alpha * x,',
    '"rsub": Function(lambda x, y, alpha=1.0: x - alpha * y,',
    "the operands of rsub change places",
    *OPS,
)
bug(
    "where-takes-the-other",
    "np.asarray(np.where(condition != 0, x, y))",
    "np.asarray(np.where(condition != 0, y, x))",
    "select of the wrong operand",
    *OPS,
)
bug(
    "hard-sigmoid-of-onnx",
    "def _hard_sigmoid(x: Array, alpha: float = 1 / 6, beta: float = 0.5)",
    "def _hard_sigmoid(x: Array, alpha: float = 0.2, beta: float = 0.5)",
    "the slope that ONNX has by default in place of torch's",
    *OPS,
)
bug(
    "layer-norm-by-the-sample-variance",
    'scale = np.sqrt(np.square(x - mean).mean(axis=axes, keepdims=True) + attrs["eps"])',
    'scale = np.sqrt(np.square(x - mean).sum(axis=axes, keepdims=True) / (np.prod([x.shape[a] for a in axes]) - 1) + attrs["eps"])',
    "a norm divides by n - 1",
    *OPS,
)
bug(
    "leaky-slope-ignored",
    "lambda x, alpha=0.01: np.where(x >= 0, x, alpha * x)",
    "lambda x, alpha=0.01: np.where(x >= 0, x, 0.01 * x)",
    "the slope of a leaky relu is always the default",
    *OPS,
)
bug(
    "group-and-column-swapped",
    'group, column = np.divmod(Index.of(attrs["units"]).array, per)',
    'column, group = np.divmod(Index.of(attrs["units"]).array, per)',
    "the channels of a grouped convolution are counted by group first",
    *OPS,
    "tests/passes/test_constant_fold.py",
)
bug(
    "causal-from-the-first-key",
    'np.tri(rows, columns, columns - rows if attrs.get("past") else 0)',
    "np.tri(rows, columns, 0)",
    "with keys of the past, the causal mask is counted from the first key",
    *OPS,
    "tests/hosts/onnx/test_fused.py",
    "tests/hosts/onnx/test_forms.py",
)
bug(
    "mask-reversed",
    "np.where(mask, scores, -np.inf) if mask.dtype == bool",
    "np.where(mask, -np.inf, scores) if mask.dtype == bool",
    "a truth mask hides what it should show",
    *OPS,
)
bug(
    "shared-heads-tiled",
    "np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3)",
    "np.concatenate([x] * (q.shape[-3] // x.shape[-3]), axis=-3)",
    "key-value heads serve query heads in turn",
    *OPS,
)
bug(
    "transposed-conv-counts-its-result",
    'many = x if attributes(node, ConvAttrs).get("transposed") else node.output.shape',
    "many = node.output.shape",
    "multiply-accumulates of a transposed convolution",
    "tests/ir/test_cost.py",
)
bug(
    "shared-parameters-count-twice",
    "key = part.name if isinstance(part, Leaf) else part\n",
    "key = node.name + part.name if isinstance(part, Leaf) else part\n",
    "a tied weight counts once for every reader",
    "tests/ir/test_cost.py",
)
bug(
    "units-that-are-no-whole-positions",
    "if count == np.count_nonzero(profile) * (mask.size // size):",
    "if count:",
    "units that a reshape scatters are followed as if they stayed together",
    "tests/ir/test_axes.py",
)
bug(
    "blocks-laid-out-by-position",
    "return wide[0], np.moveaxis(chosen, axis - segment.before[0], 0).reshape(len(index), -1)",
    "return wide[0], chosen.reshape(-1, len(index)).T",
    "the positions of a unit's block are another unit's",
    "tests/ir/test_axes.py",
    "tests/passes/test_affine_fold.py",
)
bug(
    "fold-in-single-precision",
    "array.astype(np.float64, copy=not isinstance(tensor, ArrayLiteral))",
    "array.astype(np.float32, copy=not isinstance(tensor, ArrayLiteral))",
    "folds are computed in float32",
    "tests/ir",
    "tests/passes/test_constant_fold.py",
    "tests/program/test_check.py",
)
bug(
    "attributes-of-unknown-ops-not-hashed",
    "meaning = known.get(node.origin) or sorted(node.attrs.items())",
    "meaning = sorted(node.attrs.items())",
    "the fingerprint misses what only the host knows of a node",
    "tests/hosts/test_details.py",
)
bug(
    "outputs-not-hashed",
    "lines = [repr(([_result(value) for value in graph.inputs], graph.outputs))]",
    "lines = [repr([_result(value) for value in graph.inputs])]",
    "a model with other outputs has the same fingerprint",
    "tests/hosts/test_details.py",
    "tests/program/test_plan_file.py",
)
bug(
    "weights-not-hashed",
    'return f"{leaf.dtype}{list(leaf.shape)}:{digest[:16]}"',
    'return f"{leaf.dtype}{list(leaf.shape)}:{digest[:0]}"',
    "a retrained model has the same fingerprint",
    "tests/program/test_plan_file.py",
    "tests/program/test_plan.py",
)
bug(
    "weights-not-compared",
    "        if self != other:\n            raise FingerprintError",
    "        if self.structure != other.structure:\n            raise FingerprintError",
    "a plan for other weights is accepted",
    "tests/program/test_plan_file.py",
    "tests/program/test_plan.py",
)
