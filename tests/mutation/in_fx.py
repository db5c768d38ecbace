"""Seeded bugs of the torch host: rows, patches, memory that is shared, modules, derivatives."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
DIFFERENTIAL = "tests/differential/test_differential.py"
ROWS = "tests/hosts/fx/test_rows.py"
MODULE = ("tests/hosts/fx/test_module.py", "tests/hosts/fx/test_signatures.py")
MEMORY = "tests/hosts/fx/test_memory.py"
CURVATURE = "tests/statistics/test_curvature.py"

# ---------------------------------------------------------------- rows

bug(
    "addmm-transposed",
    'return Read("linear", (1, 2, 0), {"axis": 1, "w_in": 0, "w_out": 1}, TAKES_BIAS)',
    'return Read("linear", (1, 2, 0), {"axis": 1, "w_in": 1, "w_out": 0}, TAKES_BIAS)',
    "addmm takes its weight as [in, out]",
    ROWS,
)
bug(
    "addmm-with-alpha",
    'if a["beta"] != 1 or a["alpha"] != 1:',
    "if False:",
    "alpha and beta of addmm are ignored",
    ROWS,
)
bug(
    "pads-from-the-first-axis",
    "pads[a.rank() - 1 - i] = (flat[2 * i], flat[2 * i + 1])",
    "pads[i] = (flat[2 * i], flat[2 * i + 1])",
    "torch lists the padding of the last axis first",
    ROWS,
)
bug(
    "same-padding-longer-in-front",
    "return tuple((total // 2, total - total // 2) for total in totals)",
    "return tuple((total - total // 2, total // 2) for total in totals)",
    "padding=same puts the longer part behind",
    ROWS,
)
bug(
    "pool-stride-of-one",
    'stride = integers(a["stride"], rank) if a["stride"] else kernel',
    'stride = integers(a["stride"], rank) if a["stride"] else (1,) * rank',
    "a pooling without a stride moves by its kernel",
    ROWS,
)
bug(
    "average-with-padding",
    'include_pad=bool(a["count_include_pad"])',
    'include_pad=not a["count_include_pad"]',
    "count_include_pad is read the wrong way round",
    ROWS,
)
bug(
    "divisor-ignored",
    'divisor = a.get("divisor_override")',
    "divisor = None",
    "an average pooling with its own divisor",
    ROWS,
)
bug(
    "rms-epsilon-default",
    'else torch.finfo(a.node.meta["val"].dtype).eps',
    "else 1e-5",
    "the default epsilon of torch's RMS norm",
    ROWS,
)
bug(
    "gelu-the-other-form",
    '"gelu_tanh" if a["approximate"] == "tanh" else "gelu"',
    '"gelu" if a["approximate"] == "tanh" else "gelu_tanh"',
    "the exact and the approximate gelu are mixed up",
    ROWS,
)
bug(
    "masked-fill-keeps-the-masked",
    'row("masked_fill.Scalar", "masked_fill.Tensor")(pointwise("where", 1, 2, 0))',
    'row("masked_fill.Scalar", "masked_fill.Tensor")(pointwise("where", 1, 0, 2))',
    "select of the wrong operand",
    ROWS,
)
bug(
    "transpose-does-nothing",
    "perm[i], perm[j] = perm[j], perm[i]",
    "pass",
    "a transpose of two axes is read as none",
    ROWS,
)
bug(
    "training-dropout-passes",
    '    if a["train"]:\n        return Barrier("it drops at random',
    '    if False:\n        return Barrier("it drops at random',
    "a model in training mode is lowered as if nothing were dropped",
    ROWS,
)
bug(
    "threshold-value-ignored",
    '"value": float(a["value"])})\n\n\n@row("to.dtype"',
    '"value": 0.0})\n\n\n@row("to.dtype"',
    "what a threshold puts below it",
    ROWS,
)

# ---------------------------------------------------------------- the cleaned graph

bug(
    "stack-along-the-first-axis",
    '_become(a.node, aten.cat.default, [_call(a.node, aten.unsqueeze.default, x, axis) for x in a["tensors"]], axis)',
    '_become(a.node, aten.cat.default, [_call(a.node, aten.unsqueeze.default, x, 0) for x in a["tensors"]], 0)',
    "a stack is spelled out along another axis",
    ROWS,
    "-k",
    "stack",
)
bug(
    "glu-halves-swapped",
    "_become(a.node, aten.mul.Tensor, first, _call(a.node, aten.sigmoid.default, second))",
    "_become(a.node, aten.mul.Tensor, second, _call(a.node, aten.sigmoid.default, first))",
    "the gate of a glu is its second half",
    ROWS,
)
bug(
    "weight-norm-over-its-own-axis",
    'axes = [d for d in range(a.rank()) if d != int(a["dim"]) % a.rank()]',
    'axes = [int(a["dim"]) % a.rank()]',
    "a weight norm runs over all axes but its own",
    ROWS,
)

# ---------------------------------------------------------------- patches

bug(
    "torch-groups-not-written",
    '    if attributes(node, ConvAttrs)["groups"] != attributes(before, ConvAttrs)["groups"]:\n        call["groups"] = attributes(node, ConvAttrs)["groups"]',
    "    pass",
    "a grouped convolution that lost groups says its old number",
    DIFFERENTIAL,
    "-k",
    "torch and conv or group or depthwise",
)
bug(
    "baked-sizes-stay",
    "        if isinstance(size, int) and size != -1 and size != new:",
    "        if False:",
    "the sizes that export baked into a view stay what they were",
    DIFFERENTIAL,
    "-k",
    "view or reshape or head or expand",
)
bug(
    "torch-scale-not-written",
    '        call["scale"] = attributes(node, AttentionAttrs)["scale"]',
    "        pass",
    "attention over fewer units computes its scale anew",
    "tests/structures",
    "-k",
    "attention or query or key or score",
)
bug(
    "torch-slice-ends-too-early",
    "(x, axis, keep[0], keep[-1] + 1)",
    "(x, axis, keep[0], keep[-1])",
    "the end of a slice is exclusive",
    DIFFERENTIAL,
    "-k",
    "slice or split or chunk",
)
bug(
    "split-sizes-in-another-order",
    "        split.args = (x, sizes, axis)",
    "        split.args = (x, sizes[::-1], axis)",
    "the parts of a split are taken in another order",
    DIFFERENTIAL,
    "-k",
    "split or chunk",
)
bug(
    "torch-pads-in-the-wrong-order",
    "flat = [p for low, high in reversed(pad) for p in (low, high)]",
    "flat = [p for low, high in pad for p in (low, high)]",
    "torch takes the padding of the last axis first",
    DIFFERENTIAL,
    "tests/passes/test_runtime.py",
    "-k",
    "conv or runtime",
)
bug(
    "shared-parameter-edited",
    "            if any(isinstance(form, Leaf) for form in forms):\n                continue  #",
    "            if False:\n                continue  #",
    "a fold edits a parameter that another node reads unchanged",
    DIFFERENTIAL,
    "-k",
    "module_called_twice or tied or shared_bias",
)
bug(
    "tied-weights-come-apart",
    "            if len(read) == 1:\n                self.state.update(",
    "            if False:\n                self.state.update(",
    "tied weights that change alike become two",
    *MODULE,
    "-k",
    "tied or one_weight",
)
bug(
    "rms-norm-keeps-its-width",
    '        call["normalized_shape"] = [int(node.output.shape[-1])]',
    "        pass",
    "a norm over fewer units says its old width",
    DIFFERENTIAL,
    "tests/structures",
    "-k",
    "rms or norm",
)

# ---------------------------------------------------------------- memory and modules

bug(
    "module-shares-memory",
    "    copied = _lazy_clone(plain)\n    copied = plain.clone() if copied is None else copied",
    "    copied = plain",
    "training the result trains the model that was traced",
    MEMORY,
)
bug(
    "old-weights-after-training",
    "            if any(tensors[name] is not tensor for name, tensor in before.items()):\n                self._hold(tensors)",
    "            pass",
    "a host goes on with the weights from before load_state_dict",
    MEMORY,
    *MODULE,
)
bug(
    "flags-not-flipped",
    "                    node.update_arg(positions(node.target)[TRAINING_FLAGS[opname(node)]], mode)",
    "                    pass",
    "train() leaves dropout and batch norm as they were",
    *MODULE,
)
bug(
    "load-into-not-compared",
    "ALLOWED = 1e-5",
    "ALLOWED = 1e9",
    "a module that computes something else is accepted",
    "tests/hosts/fx/test_load.py",
    "-k",
    "put_back",
)
bug(
    "load-into-not-undone",
    "        for step in reversed(undo):\n            step()\n        raise",
    "        raise",
    "a module that was refused stays half changed",
    "tests/hosts/fx/test_load.py",
    "-k",
    "put_back",
)
bug(
    "new-parameters-need-no-gradient",
    "    return torch.nn.Parameter(tensor, requires_grad=like.requires_grad)",
    "    return torch.nn.Parameter(tensor, requires_grad=False)",
    "a folded weight is frozen",
    *MODULE,
    MEMORY,
)

# ---------------------------------------------------------------- derivatives

bug(
    "draws-divided-twice",
    "scale = 1.0 / math.sqrt(request.draws)",
    "scale = 1.0 / request.draws",
    "the rows of a Monte Carlo estimate are scaled by 1/n, and squared afterwards",
    CURVATURE,
)
bug(
    "rows-not-about-their-mean",
    "yield [_per_sample(weight, b) * (b - m) for b, m in zip(row, mean, strict=True)]",
    "yield [_per_sample(weight, b) * b for b, m in zip(row, mean, strict=True)]",
    "the curvature of a softmax is taken about 0",
    CURVATURE,
)
bug(
    "squared-error-doubled",
    "return 0.5 * ((logits - labels.to(logits.dtype)) ** 2).sum()",
    "return ((logits - labels.to(logits.dtype)) ** 2).sum()",
    "the factor of a squared error",
    CURVATURE,
)
bug(
    "second-derivatives-of-the-wrong-weight",
    'matrix = matrix if attributes(source, LinearAttrs)["w_out"] == 0 else matrix.T',
    'matrix = matrix.T if attributes(source, LinearAttrs)["w_out"] == 0 else matrix',
    "second derivatives go through the weight the wrong way",
    CURVATURE,
)
bug(
    "unlabelled-positions-count",
    'ignore_index=-100, reduction="sum"',
    'ignore_index=-1, reduction="sum"',
    "positions without a label take part in the loss",
    CURVATURE,
)
