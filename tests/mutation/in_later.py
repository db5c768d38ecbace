"""Seeded bugs of what came later: integers that are folded, recovery, reduction."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
QUANTISED = "tests/hosts/onnx/test_quantised.py"
INTEGERS = "tests/passes/test_integers.py"
RECOVER = "tests/recovery/test_recover.py"
GOALS = "tests/reduction/test_goals.py"
REDUCER = "tests/reduction/test_reducer.py"
STORED = "tests/passes/test_stored_numbers.py"
CHECK = "tests/program/test_check.py"
PROGRESS = "tests/planning/test_progress.py"
CHECKPOINT = "tests/hosts/fx/test_checkpoint.py"

# ---------------------------------------------------------------- integers

bug(
    "grid-by-rounding-down",
    "    steps = np.rint(values / step)\n",
    "    steps = np.floor(values / step)\n",
    "a constant on the grid is taken for the step below it",
    INTEGERS,
)
bug(
    "every-constant-is-on-the-grid",
    "return steps if bool(np.all(np.abs(steps * step - values) <= 1e-6 * np.abs(values))) else None",
    "return steps",
    "a constant between two steps is rounded to one of them",
    INTEGERS,
)
bug(
    "bias-on-another-grid",
    "    scale = constant(weight.scale).reshape(-1) * step\n",
    "    scale = constant(weight.scale).reshape(-1)\n",
    "the bias has the scale of the weight, without that of the activation",
    QUANTISED,
)
bug(
    "whole-numbers-with-their-zero-point",
    "        parts = (self.numbers, scale) if self.zero is None else (self.numbers, scale, self.zero)\n",
    "        parts = (self.numbers, scale)\n",
    "the zero point of a weight is forgotten",
    QUANTISED,
)
bug(
    "affine-into-integers",
    "    return NOT_AFFINE if mixed else blocks_cut(weight, axis, keep)",
    "    return blocks_cut(weight, axis, keep)",
    "an affine map is folded into integers, which must then be rounded",
    QUANTISED,
)
bug(
    "blocks-may-be-cut",
    "    return mixed or short\n",
    "    return False\n",
    "units of one block stay with the scale of another",
    QUANTISED,
)
bug(
    "scales-of-the-first-blocks",
    "            at = [k // self.block for k in keep[:: self.block]]\n",
    "            at = list(range(len(keep[:: self.block])))\n",
    "blocks that stay get the scales of the first ones",
    QUANTISED,
)
bug(
    "scales-stay-when-channels-go",
    "        return replace(self, numbers=numbers, scale=self._part(self.scale, axis, at), zero=self._zeros(axis, at))",
    "        return replace(self, numbers=numbers)",
    "channels go, and their scales stay",
    QUANTISED,
)
bug(
    "scales-keep-their-axis-when-turned",
    "axis=None if self.axis is None else list(perm).index(self.axis))",
    "axis=self.axis)",
    "a transposed weight has its scales along the old axis",
    "tests/ir/test_tensors.py",
)

# ---------------------------------------------------------------- recovery

bug(
    "last-weights-instead-of-the-best",
    "    host = lowered.host.with_parameters(run.best) if run.is_better else lowered.host",
    "    host = lowered.host.with_parameters(run.learner.parameters())",
    "the weights of the last step are returned, however bad",
    f"{RECOVER}::test_the_weights_that_are_returned_are_the_best_and_not_the_last",
)
bug(
    "worse-is-better",
    "        return self.best_loss < self.began",
    "        return self.best_loss <= self.began",
    "weights that did not get better count as recovered",
    f"{RECOVER}::test_weights_that_did_not_move_are_not_called_recovered",
)
bug(
    "judged-by-a-sum",
    "        loss = sum(total for total, _ in pairs) / sum(count for _, count in pairs)",
    "        loss = sum(total for total, _ in pairs)",
    "the held-out loss grows with the number of samples",
    RECOVER,
)
bug(
    "resumed-without-its-state",
    "        self.learner.restore(saved.state)\n",
    "",
    "a run goes on from the weights that it began with",
    RECOVER,
)
bug(
    "resumed-from-the-first-batch",
    "        number, skip = divmod(self.step, per_epoch)",
    "        number, skip = self.step // per_epoch, 0",
    "a resumed run sees batches of its epoch again",
    f"{RECOVER}::test_a_run_that_goes_on_takes_the_batches_that_it_has_not_seen",
)
bug(
    "trained-on-held-out-data",
    "        return Pool([_take(self.parts[0], order[apart:])], self.size), Pool(",
    "        return Pool([_take(self.parts[0], order)], self.size), Pool(",
    "the data that judge are trained on as well",
    RECOVER,
)
bug(
    "epochs-in-one-order",
    "        rng = np.random.default_rng([seed, 1, number])",
    "        rng = np.random.default_rng([seed, 1, 0])",
    "every epoch has the order of the first",
    f"{RECOVER}::test_a_run_that_goes_on_takes_the_batches_that_it_has_not_seen",
)

# ---------------------------------------------------------------- reduction

bug(
    "certified-by-anything",
    "        if count < needed:\n",
    "        if count < 0:\n",
    "too few samples are found out only after the work",
    GOALS,
)
bug(
    "size-by-macs",
    "            part = m.bytes / whole.bytes",
    "            part = m.macs / max(whole.macs, 1)",
    "the goal for the file is judged by multiply-adds",
    GOALS,
)
bug(
    "slower-is-faster",
    'said.append(Judgement(f"speedup {self.speedup:g}", value >= self.speedup, shown))',
    'said.append(Judgement(f"speedup {self.speedup:g}", value <= self.speedup, shown))',
    "a model that is not fast enough meets the goal",
    GOALS,
)
bug(
    "not-measured-is-fast",
    "            time = m.speed.milliseconds.value if m.speed else math.inf",
    "            time = m.speed.milliseconds.value if m.speed else 0.0",
    "a latency that nobody measured meets the goal",
    GOALS,
)
bug(
    "sizes-out-of-reach-are-tried",
    "        within = [share for share in wanted if share >= floor]",
    "        within = [share for share in wanted if share < floor]",
    "of the sizes those stay that cannot be reached",
    REDUCER,
)

# ---------------------------------------------------------------- sizes, checks, checkpoints of plans

bug(
    "factors-of-the-kept-columns",
    "    columns = take(weight, w_in, units)\n    if axis ==",
    "    columns = take(weight, w_in, range(len(units)))\n    if axis ==",
    "constants by position meet the first columns instead of their own",
    STORED,
)
bug(
    "products-are-always-stored",
    "    return values.size + math.prod(columns.shape) + bias <= added and added > removed_by(weight, smaller)",
    "    return False",
    "constants by position grow the file, though their factors would not",
    STORED,
)
bug(
    "float64-of-nothing",
    "        apart = max(apart, float(gap))\n    return apart\n",
    "    return apart\n",
    "a wrong fold is not seen in float64",
    CHECK,
)
bug(
    "jumps-are-compared",
    "        if node.name in casts or fn in JUMPING:\n            jumping.add(fn)\n",
    "",
    "the last bit in front of a rounding counts as a wrong fold",
    CHECK,
)
bug(
    "float64-is-not-judged",
    "        return close and not self.stored and (self.folded is None or self.folded <= self._folded_allowed)",
    "        return close and not self.stored",
    "a wrong fold that float64 shows counts as equal",
    CHECK,
)
bug(
    "cancelling-maps-fold",
    "    if np.any(cancelled > LARGEST_LOSS * itself):\n",
    "    if False:\n",
    "units become small differences of large numbers",
    "tests/passes/test_affine_fold.py",
)
bug(
    "losses-of-another-plan",
    '    together = " ".join(plan_digest(plan) for plan in plans)',
    "    together = str(len(plans))",
    "what was probed for other plans is taken after an interruption",
    f"{PROGRESS}::test_losses_are_those_of_the_plans_that_were_measured",
)
bug(
    "counts-of-another-run",
    "        if read.asked != self.asked:\n            raise self._of_another_run(path)\n        return read.numbers",
    "        return read.numbers",
    "a checkpoint of another model decides how many units go",
    f"{PROGRESS}::test_a_checkpoint_of_counts_that_is_not_this_runs_is_refused",
)
bug(
    "probed-again",
    "            if self.progress is not None:\n                self.progress.save_losses(plans, losses)\n",
    "",
    "an interrupted plan measures its sites again",
    f"{PROGRESS}::test_an_interrupted_budget_is_not_probed_again",
)
bug(
    "joined-by-the-last",
    "            np.minimum.at(self.parent, np.maximum(a, b), np.minimum(a, b))",
    "            np.maximum.at(self.parent, np.minimum(a, b), np.maximum(a, b))",
    "units that meet get different identities",
    "tests/program/test_groups.py::test_identities_that_stand_several_times_on_one_side_are_joined",
)

# ---------------------------------------------------------------- checkpoint folders

bug(
    "offsets-of-the-first-tensor",
    '"data_offsets": [start, end]}\n            start = end\n',
    '"data_offsets": [start, end]}\n',
    "every tensor of a file begins where the first does",
    f"{CHECKPOINT}::test_equal_widths_go_into_the_config",
)
bug(
    "old-weights-in-the-folder",
    "        expression = self.written.expressions.get(name)\n        if expression is None:",
    "        expression = None\n        if expression is None:",
    "the folder gets the weights of the original",
    f"{CHECKPOINT}::test_equal_widths_go_into_the_config",
)
bug(
    "config-of-the-original",
    "        if changes and not misfits:\n            changed = {**json.loads(text), **changes}",
    "        if changes and not misfits:\n            changed = {**json.loads(text)}",
    "config.json keeps the old widths",
    f"{CHECKPOINT}::test_equal_widths_go_into_the_config",
)
bug(
    "larger-results-are-taken",
    "    if more <= 0:\n        return\n",
    "    if more <= 10**9:\n        return\n",
    "a file that holds more numbers than the model is written without a word",
    "tests/program/test_growth.py",
)
bug(
    "what-stays-may-not-grow",
    "        if not result.residue and growth",
    "        if growth",
    "what was asked to stay at run time is refused for the numbers that it needs",
    "tests/program/test_growth.py",
    "tests/cli/test_cli.py",
)
bug(
    "recurrent-bias-is-lost",
    "            operands += (None,) * (4 - len(operands))\n",
    "",
    "a recurrent layer without a bias forgets the constants that it read",
    "tests/fuzz/test_fuzz.py::test_what_failed_once",
)
bug(
    "held-units-stay-in-the-recurrence",
    "    mask[list(units)] = 0.0\n",
    "",
    "a hidden unit that is replaced inside a recurrence is still read by its gates",
    "tests/structures/test_recurrent.py",
)
bug(
    "held-constants-are-lost",
    "        if values.any():\n            inputs[bias]",
    "        if not values.any():\n            inputs[bias]",
    "the gates of a recurrent op do not see the constants of its hidden units",
    "tests/structures/test_recurrent.py",
)
bug(
    "fed-back-units-are-dropped",
    "    while more := {int(u) for u in",
    "    while more := set[int]() and {int(u) for u in",
    "hidden units that the gates read are dropped since nobody outside reads them",
    "tests/structures/test_recurrent.py",
)
bug(
    "reset-gate-is-forgotten",
    "    if recurrence.resets_state and",
    "    if not recurrence.stacked and",
    "a GRU that resets the state before R reads it takes constants as if it did so after",
    "tests/structures/test_recurrent.py",
)
bug(
    "float64-epsilon-is-narrowed",
    '    return dtype != "float64" or float(np.float32(number)) == number',
    "    return True",
    "a norm of float64 gets an epsilon, and a pad a value, of float32",
    "tests/fuzz/test_fuzz.py::test_what_failed_once",
)
bug(
    "parts-of-constants-are-values",
    "            known\n            and isinstance(steps, list)",
    "            False\n            and isinstance(steps, list)",
    "an Einsum of two weights is replaced where its reader has read it as a constant",
    "tests/fuzz/test_fuzz.py::test_what_failed_once",
)
bug(
    "a-node-that-came-apart-stays",
    '    patch.reason = f"{node.kind} of {node.label}"\n    patch.retire(onnx_node)\n',
    '    patch.reason = f"{node.kind} of {node.label}"\n',
    "a fused node whose parts stand apart stays in the file, with sizes that no longer fit",
    "tests/fuzz/test_fuzz.py::test_what_failed_once",
)
