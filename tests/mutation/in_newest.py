"""Seeded bugs of what came last: carriers, hidden units, calibration piece by piece, sums in one order, values that are read in part."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
CARRIER = "tests/passes/test_carrier.py"
RECURRENT = "tests/structures/test_recurrent.py"
BASIS = "tests/passes/test_basis_fold.py"
ONCE = "tests/fuzz/test_fuzz.py::test_what_failed_once"
SPILLED = "tests/planning/test_spilled.py"
NUMERICS = "tests/planning/test_numerics.py"

# ---------------------------------------------------------------- a channel that carries constants

bug(
    "carrier-without-its-number",
    "    values = np.broadcast_to(slab.reshape(-1), len(units)) / carrier.number\n",
    "    values = np.broadcast_to(slab.reshape(-1), len(units))\n",
    "behind a hard swish, where the carrier is 4, the constants arrive fourfold",
    CARRIER,
)
bug(
    "carrier-keeps-its-weights",
    "    weight = _with_one(weight, rows, carrier.unit, 0.0)\n",
    "",
    "the channel is its number and what its weights make of the input",
    CARRIER,
)
bug(
    "carrier-with-the-norm-of-before",
    "        scale, shift = _with_one(scale, 0, carrier.unit, 0.0), _with_one(shift, 0, carrier.unit, carrier.number)\n",
    "        shift = _with_one(shift, 0, carrier.unit, carrier.number)\n",
    "a batch norm scales the carrier's channel, whose weights are 0 but whose bias and mean are not",
    CARRIER,
)
bug(
    "carrier-behind-any-function",
    "        arrives &= (result == number).all(axis=others)\n",
    "        arrives &= np.isfinite(result).all(axis=others)\n",
    "a sigmoid makes .73 of the carrier's 1",
    CARRIER,
)
bug(
    "carrier-seen-by-others",
    "        if len(readers) != 1 or name in graph.outputs:\n",
    "        if not readers:\n",
    "another reader, or an output, sees 1 where the unit was",
    CARRIER,
)
bug(
    "carrier-of-an-output",
    "        if len(readers) != 1 or name in graph.outputs:\n",
    "        if len(readers) != 1:\n",
    "an output of the model shows 1 where the unit was",
    CARRIER,
)
bug(
    "carrier-keeps-its-column",
    "    carrying = with_part(mixed, w_in, carrier.unit, column)\n",
    "    carrying = mixed\n",
    "the constants are never added: the carrier's column is the unit's own",
    CARRIER,
)
bug(
    "carrier-from-a-replaced-parent",
    "    if slab.any() and not by_position and has_border(node) and keep.ordered:\n",
    "    if slab.any() and not by_position and has_border(node):\n",
    "a replaced unit from which others are rebuilt is lost",
    CARRIER,
)
bug(
    "carrier-in-a-larger-file",
    "    return _bias(conv) is not None or left + 1 <= (gone - 1) * row\n",
    "    return True\n",
    "a convolution without a bias gets one that has more numbers than what goes",
    CARRIER,
)

# ---------------------------------------------------------------- hidden units of recurrent layers

bug(
    "ragged-ends-take-constants",
    "    if moved and recurrence.ragged:\n",
    "    if moved and recurrence.ragged and recurrence.resets_state:\n",
    "a constant is returned behind the end of a sequence, where the op returns 0",
    f"{RECURRENT}::test_what_is_not_exact_is_refused_with_the_mathematics",
)
bug(
    "peepholes-keep-their-length",
    "        inputs[recurrence.peepholes] = _rows(peepholes, keeps[0], hidden, 1)\n",
    "        inputs[recurrence.peepholes] = _rows(peepholes, range(hidden), hidden, 1)\n",
    "a narrower LSTM has the peepholes of all its units",
    f"{RECURRENT}::test_constants_at_every_step",
)
bug(
    "a-missing-bias-is-looked-up",
    "            operand = inputs[place] if 0 <= place < len(inputs) else None",
    "            operand = inputs[place] if place >= 0 else None",
    "narrowing a layer that came out of a fold without a bias ends in a raw error",
    f"{ONCE}[affine_in_front_of_narrowed_recurrent_layer]",
)
bug(
    "type-of-a-layer-by-its-input-alone",
    "for o in operands[:3] if (kind := self._dtype_of(o))",
    "for o in operands[:1] if (kind := self._dtype_of(o))",
    "a recurrent layer behind an op that nobody can type has no type, though its weights have one",
    f"{ONCE}[recurrent_layer_of_a_type_that_nobody_says]",
)

# ---------------------------------------------------------------- calibration piece by piece

bug(
    "next-piece-loses-its-values",
    "        spill.forget_values(level - 1)\n",
    "        spill.forget_values(level)\n",
    "what the next piece reads is removed instead of what was read",
    f"{SPILLED}::test_statistics_are_those_of_one_pass_to_the_last_bit",
)
bug(
    "done-pieces-run-again",
    "        return Stats.load(path, mapped=True) if path.exists() else None\n",
    "        return None\n",
    "after an interruption every piece is measured again",
    f"{SPILLED}::test_a_piece_that_is_done_is_not_run_again",
)
bug(
    "pieces-of-another-request",
    "        if note.exists() and note.read_text() != self.asked:\n",
    "        if note.exists() and not note.read_text():\n",
    "pieces that were measured with other options are mixed with these",
    f"{SPILLED}::test_what_cannot_be_done_is_refused",
)
bug(
    "pieces-read-other-data",
    "            if done and stats.data != done[0].data:\n",
    "            if done and stats.data is None:\n",
    "one piece is calibrated on other data than the rest",
    f"{SPILLED}::test_data_that_change_between_pieces_are_refused",
)

# ---------------------------------------------------------------- sums in one order

bug(
    "sums-by-all-threads",
    "                library.set_num_threads(1)\n",
    "                library.set_num_threads(count)\n",
    "OpenBLAS adds up in an order that depends on its threads",
    f"{NUMERICS}::test_the_same_seed_gives_the_same_bytes_in_every_process_on_any_number_of_threads",
)
bug(
    "upper-triangle-is-forgotten",
    "        result[start:end, end:] = result[end:, start:end].T\n",
    "        result[start:end, end:] = 0\n",
    "products of distant units are 0 in the sums of a wide site",
    "tests/test_one_order.py",
)

# ---------------------------------------------------------------- values that several readers read in part

bug(
    "a-single-reader-shares",
    "            if len({reader.name for reader in readers}) > 1 and all(",
    "            if len({reader.name for reader in readers}) > 0 and all(",
    "a gather of one reader is said to be shared, and is no residue any more",
    "tests/passes/test_pipeline.py",
)
bug(
    "products-are-shared-too",
    "        if node.op not in WEIGHS and not unknown and all(",
    "        if not unknown and all(",
    "what weights made is computed whole and read in part, without a word",
    "tests/passes/test_pipeline.py",
)

# ---------------------------------------------------------------- files and configs

bug(
    "file-growth-the-wrong-way",
    '            more["bytes in the file"] = self.files.after - self.files.before\n',
    '            more["bytes in the file"] = self.files.before - self.files.after\n',
    "a smaller file is called larger, and a larger one passes",
    "tests/program/test_growth.py",
)
bug(
    "two-models-share-a-config",
    "            module.config = copy.deepcopy(config, copies)\n",
    "            module.config = copies[id(config)] = config\n",
    "the config of another model gets the widths of the lowered one",
    "tests/hosts/fx/test_load.py",
)
bug(
    "every-step-is-unread",
    "            if apart.any() and not _are_read(lowered, inputs, node, apart):\n",
    "            if apart.any():\n",
    "a wrong fold in front of a rounding is not seen in float64",
    "tests/program/test_check.py::test_a_wrong_fold_in_front_of_a_rounding_is_seen_in_float64",
)

# ---------------------------------------------------------------- units in another basis

bug(
    "other-side-without-the-inverse",
    "        back = {own: np.linalg.inv(blocks[block]).T for own, block in partners.items()}\n",
    "        back = {own: blocks[block].T for own, block in partners.items()}\n",
    "queries are turned by the transpose, not by the inverse transpose",
    f"{BASIS}::test_a_basis_goes_into_weights[keys]",
)
bug(
    "other-side-without-the-transpose",
    "        back = {own: np.linalg.inv(blocks[block]).T for own, block in partners.items()}\n",
    "        back = {own: np.linalg.inv(blocks[block]) for own, block in partners.items()}\n",
    "queries are turned by the inverse, not by the inverse transpose",
    f"{BASIS}::test_a_basis_goes_into_weights[keys]",
)
bug(
    "reader-without-the-transpose",
    "{i: np.linalg.inv(blocks[b]).T for i, b in enumerate(here)})\n",
    "{i: np.linalg.inv(blocks[b]) for i, b in enumerate(here)})\n",
    "the output projection is turned by the transpose of the inverse",
    f"{BASIS}::test_a_basis_goes_into_weights[values]",
)
bug(
    "basis-of-another-head",
    '        here = self.along(step.layout, attrs["axis"], step.node)\n',
    '        here = self.along(step.layout, attrs["axis"], step.node)[::-1]\n',
    "the output projection is turned by the matrices of other heads",
    f"{BASIS}::test_a_basis_goes_into_weights[values]",
)
bug(
    "packed-parts-begin-at-the-first-block",
    "joined([(len(kept), int(steps[0]) if len(steps) else 0)]), int(kept[0]))\n",
    "joined([(len(kept), int(steps[0]) if len(steps) else 0)]), 0)\n",
    "the basis of keys is that of the queries in a packed projection",
    f"{BASIS}::test_a_basis_goes_into_weights[packed]",
)
bug(
    "bias-stays-in-the-old-basis",
    "            self.write(maker, 2, 0, blocks)\n",
    "            pass\n",
    "the weight is turned and its bias is not",
    f"{BASIS}::test_a_basis_goes_into_weights[keys]",
)
bug(
    "what-is-added-behind-stays",
    "            if goes_on and is_addition(step):\n                self.turn_addend(step, blocks)\n            elif not goes_on:\n                ends",
    "            if goes_on and is_addition(step):\n                pass\n            elif not goes_on:\n                ends",
    "what is added behind the replacement is in the old basis",
    f"{BASIS}::test_a_basis_goes_into_weights[layers]",
)
bug(
    "others-may-read-the-units",
    '                raise Unfoldable(f"{said(step.node)} reads these units, too")\n',
    "                pass\n",
    "another reader of the queries sees them in the new basis",
    f"{BASIS}::test_stops",
)
bug(
    "any-matrix-is-a-basis",
    "    if not condition[worst] <= CONDITION:\n",
    "    if condition[worst] < 1:\n",
    "a singular matrix is taken for a basis",
    "tests/program/test_basis.py::test_a_basis_that_cannot_be_inverted_is_refused",
)
