"""Seeded bugs of affine_fold and dead_subgraph, and of the cut at sites."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
HOST = (
    "tests/hosts/onnx/test_write.py",
    "tests/hosts/onnx/test_host.py",
    "tests/hosts/onnx/test_names.py",
    "tests/hosts/onnx/test_shapes.py",
)
CONSTANT = ("tests/passes/test_constant_fold.py", "tests/passes/test_runtime_stops.py")
AFFINE = "tests/passes/test_affine_fold.py"
DEAD = "tests/passes/test_dead_subgraph.py"

# ---------------------------------------------------------------- affine relations sink

bug(
    "parents-not-scaled-back",
    "weight = a_s[:, None] * relation.weight / np.where(used, a_p, 1.0)[None, :]",
    "weight = a_s[:, None] * relation.weight",
    "behind a scaling the parents are scaled too, which nobody divides by",
    AFFINE,
)
bug(
    "shift-of-the-parents-added",
    "slab=slab + (d_s - lost).reshape(along)",
    "slab=slab + (d_s + lost).reshape(along)",
    "the sign of what the parents were shifted by",
    AFFINE,
)
bug(
    "vanishing-parents-divide",
    "SMALLEST_SCALE = 1e-6",
    "SMALLEST_SCALE = 0.0",
    "a parent that a batch norm scales to almost nothing is divided by",
    AFFINE,
)
bug(
    "two-relations-meet",
    'return several if not relation.alone and node.op != "concat" else RULES.get(node.op, stop)',
    "return RULES.get(node.op, stop)",
    "of two operands with affine replacements only one is looked at",
    AFFINE,
)
bug(
    "padding-shifts-a-relation",
    'if not ALONG[fn].linear or (fn == "pad" and attrs["value"] != 0):',
    "if not ALONG[fn].linear:",
    "padding by another number than 0 is taken to be linear",
    AFFINE,
)
bug(
    "parents-that-are-replaced-behind",
    "if here & (set(relation.units) | set(relation.parents)):",
    "if here & set(relation.units):",
    "two affine replacements become one though one replaces the parents of the other",
    AFFINE,
)
bug(
    "parents-replaced-before",
    '    if set(attrs.get("parents", ())) & set(relation.units):\n        return Declined("the parents of an affine replacement',
    '    if False:\n        return Declined("the parents of an affine replacement',
    "a later replacement reads units that this one replaces",
    AFFINE,
)
bug(
    "concat-moves-units-without-parents",
    "parents=tuple(p + offset for p in relation.parents)",
    "parents=relation.parents",
    "in a concat the parents keep their numbers",
    AFFINE,
)
bug(
    "relation-transposed-the-other-way",
    "replace(relation, axis=perm.index(relation.axis), slab=np.transpose(relation.slab, perm))",
    "replace(relation, axis=perm[relation.axis], slab=np.transpose(relation.slab, perm))",
    "the permutation is applied in the wrong direction",
    AFFINE,
)
bug(
    "rounding-to-integers-is-affine",
    '    if fn == "cast" and not attributes(node, PointwiseAttrs).get("dtype", "").startswith(("float", "bfloat")):',
    "    if False:",
    "a cast to whole numbers lets affine replacements pass",
    AFFINE,
)
bug(
    "parents-in-another-group",
    "if np.any(relation.weight[unit_group[:, None] != parent_group[None, :]]):",
    "if False:",
    "a grouped convolution takes in a unit whose parents another group reads",
    AFFINE,
)
bug(
    "constant-part-forgotten-in-a-select",
    "        weight=relation.weight[rows][:, used],\n        slab=np.take(relation.slab, chosen, axis=axis),",
    "        weight=relation.weight[rows][:, used],\n        slab=0 * np.take(relation.slab, chosen, axis=axis),",
    "behind a select the affine part stays and the constant part is lost",
    AFFINE,
)

# ---------------------------------------------------------------- selects rise

bug(
    "first-rows-of-the-bias",
    "bias = take(bias, len(bias.shape) - 1, keep)",
    "bias = take(bias, len(bias.shape) - 1, range(len(keep)))",
    "the weight keeps the right rows, the bias the first ones",
    DEAD,
)
bug(
    "removed-groups-keep-their-inputs",
    "inputs = members(left, ins)",
    "inputs = members(left, outs)",
    "of a grouped convolution the inputs are counted like outputs",
    DEAD,
)
bug(
    "rows-from-the-right-operand",
    "return shrunk(node, (left, rise.select(right, len(rise.shape(right)) - 1, keep)), axis, keep)",
    "return shrunk(node, (left, rise.select(right, len(rise.shape(right)) - 2, keep)), axis, keep)",
    "columns of a product are selected along its contracted axis",
    DEAD,
)
bug(
    "mask-keeps-all-heads",
    "masks[i] = mask if local is None else rise.select(mask, local, keep)",
    "masks[i] = mask",
    "heads go, and the mask that has one row per head stays",
    DEAD,
)
bug(
    "key-value-heads-interleaved",
    "counts = count_by_group(keep, served, heads // served)",
    "counts = count_by_group([head % served for head in keep], served, 1)",
    "query heads are taken to share key-value heads in turn",
    DEAD,
)
bug(
    "outputs-are-narrowed",
    "if len(node.outputs) != 1 or name in rise.graph.outputs:",
    "if len(node.outputs) != 1:",
    "a value that the model returns loses the units that nobody else reads",
    DEAD,
)
bug(
    "other-readers-ignored",
    'if len(selects) < len(readers) and any(r.op != "select" and not _reads_other_sizes(r, selects) for r in readers):',
    "if False:",
    "a value is narrowed though somebody reads all of it",
    DEAD,
)
bug(
    "readers-agree-on-the-common-part",
    "return Keep(sorted(set().union(*parts)), period)",
    "return Keep(sorted(set(parts[0]).intersection(*parts)), period)",
    "of what several readers need only the common part is kept",
    DEAD,
)
bug(
    "readers-do-not-count-anew",
    'places = [where[k] for k in attributes(reader, SelectAttrs)["keep"]]',
    'places = list(attributes(reader, SelectAttrs)["keep"])',
    "a select goes on counting in the value as it was",
    DEAD,
)
bug(
    "effects-are-dropped",
    "if not alive and name not in idle and not node.marks.effect:",
    "if not alive and name not in idle:",
    "a node with an effect and no reader is removed",
    DEAD,
    *HOST,
    "tests/hosts/fx/test_module.py",
    "tests/hosts/fx/test_signatures.py",
)
bug(
    "stale-sizes-are-read",
    'return sizes is not None and all(attributes(select, SelectAttrs)["axis"] not in sizes for select in selects)',
    "return sizes is not None",
    "the size of an axis is read though units of it are gone",
    DEAD,
    "tests/hosts/onnx/test_shapes.py",
)
bug(
    "parents-keep-their-numbers",
    'changes["parents"] = tuple(where[p] for p in parents)',
    'changes["parents"] = parents',
    "an affine replacement that stays reads other units when some are gone",
    DEAD,
)
bug(
    "select-of-a-select-forgets-the-first",
    'rest = tuple(attrs["keep"][k] for k in keep)',
    "rest = tuple(keep)",
    "positions of a selection are taken for positions of the value",
    DEAD,
)
bug(
    "causal-queries-dropped",
    'if axis == rank - 2 and attributes(node, AttentionAttrs).get("causal"):',
    "if False:",
    "queries of causal attention are dropped, and the others count as earlier ones",
    DEAD,
)
bug(
    "share-of-the-next-part",
    "share = [k - offset for k in keep if offset <= k < offset + size]",
    "share = [k - offset for k in keep if offset <= k <= offset + size]",
    "a concat asks a part for the first unit of the next",
    DEAD,
)
bug(
    "different-repeats",
    "if repeats.shape[1] != each or not np.all(repeats == repeats[0]):",
    "if repeats.shape[1] != each:",
    "of every repeat the positions of the first are kept",
    DEAD,
)
bug(
    "keep-and-removed-swapped",
    "return Keep.from_array(remaining(units, size))",
    "return Keep.from_array(np.asarray(sorted(units)[: size - len(set(units))] or remaining(units, size)))",
    "the units that go are kept, and those that stay are removed",
    *CONSTANT,
)

# ---------------------------------------------------------------- where a graph is cut

bug(
    "site-seen-too-early",
    "seen_at[value.name] = max(above) + int(value.name in sites)",
    "seen_at[value.name] = max(above)",
    "what lies behind a site is computed before the intervention",
    "tests/passes/test_interchange.py",
    "tests/verification/test_interventions.py",
)
bug(
    "piece-of-the-earliest-operand",
    "made_at[value.name] = max(above)",
    "made_at[value.name] = min(above)",
    "a value is computed before one of its operands",
    "tests/passes/test_interchange.py",
    "tests/verification/test_interventions.py",
)
