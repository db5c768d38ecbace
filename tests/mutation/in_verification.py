"""Seeded bugs of verification: interventions, draws, evidence, bounds, certificates."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
INTERVENTIONS = "tests/verification/test_interventions.py"
VERIFIER = ("tests/verification/test_verifier.py", "tests/verification/test_outputs.py")
BOUNDS = "tests/verification/test_bounds.py"
CERTIFICATES = "tests/verification/test_certificates.py"
KNOWN = "tests/verification/test_known_answers.py"

bug(
    "kl-reversed",
    "kl = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=2), 0.0)",
    "kl = np.maximum((np.exp(log_q) * (log_q - log_p)).sum(axis=2), 0.0)",
    "KL(reduced, original) in place of KL(original, reduced)",
    *VERIFIER,
)
bug(
    "base-and-source-swapped",
    "            Swap(site, draw.source, self._with_positions(",
    "            Swap(site, draw.base, self._with_positions(",
    "every input meets itself",
    *VERIFIER,
    KNOWN,
)
bug(
    "source-as-the-base",
    "return model.intervene(draw.base, swaps)[self.output]",
    "return model.intervene(draw.source, swaps)[self.output]",
    "base and source change places",
    *VERIFIER,
    KNOWN,
)
bug(
    "tokens-of-the-source-count",
    "counted = None if self.data.counted is None else self.data.counted[draw.base]",
    "counted = None if self.data.counted is None else self.data.counted[draw.source]",
    "the tokens that count are those of the source",
    *VERIFIER,
    KNOWN,
)
bug(
    "padding-is-swapped",
    "return np.asarray(mask[:, None, :] & (counted[draw.base] & counted[draw.source])[:, :, None])",
    "return mask",
    "tokens that only fill up are swapped",
    *VERIFIER,
    KNOWN,
)
bug(
    "replaced-units-are-swapped",
    "        chosen = {v.value: v.over(v.keep, draw.masks[v.value]) for v in self.variables}\n        narrow",
    "        chosen = {v.value: draw.masks[v.value] for v in self.variables}\n        narrow",
    "in the original the replaced units are swapped as well",
    *VERIFIER,
    KNOWN,
)
bug(
    "control-of-retained-units",
    "        chosen = {v.value: v.over(v.replaced, draw.masks[v.value]) for v in self.variables}",
    "        chosen = {v.value: v.over(v.keep, draw.masks[v.value]) for v in self.variables}",
    "the control that swaps replaced units swaps the others",
    *VERIFIER,
    "-k",
    "control_swaps",
)
bug(
    "delta-doubled",
    "enough, aim = math.log(1 / delta), math.log(AIM / delta)",
    "enough, aim = math.log(1 / (4 * delta)), math.log(AIM / delta)",
    "a bound fails four times as often as it says",
    BOUNDS,
)
bug(
    "exact-bound-one-short",
    "special.betaincinv(hits, count - hits + 1, delta)",
    "special.betaincinv(hits + 1, count - hits, delta)",
    "the upper end in place of the lower",
    BOUNDS,
)
bug(
    "two-sided-as-one-sided",
    "array, delta = np.asarray(values, dtype=np.float64), (1 - level) / 2",
    "array, delta = np.asarray(values, dtype=np.float64), 1 - level",
    "a two-sided interval spends delta on each side",
    BOUNDS,
)
bug(
    "bootstrap-one-sided",
    "[(1 - level) / 2, (1 + level) / 2])",
    "[1 - level, level])",
    "a two-sided bootstrap interval spends delta on each side",
    BOUNDS,
)
bug(
    "masks-not-averaged",
    "return np.asarray(np.add.reduceat(swaps, starts) / np.diff(starts, append=len(swaps)))",
    "return np.asarray(swaps[starts])",
    "of the swaps of a pair only the first counts",
    *VERIFIER,
    CERTIFICATES,
    KNOWN,
)
bug(
    "swaps-are-independent",
    "    first, second = order[2 * unit], order[2 * unit + 1]",
    "    first, second = order[unit], order[unit + 1]",
    "an input is used in two pairs",
    *VERIFIER,
    BOUNDS,
    KNOWN,
)
bug(
    "hard-inputs-count-as-often",
    "importance = np.where(easy[bases[unit]], 1.0, 1 / stress)",
    "importance = np.ones(len(unit))",
    "inputs that are drawn more often count as much as others",
    *VERIFIER,
    KNOWN,
    BOUNDS,
)
bug(
    "margin-to-the-last",
    "spread, margin = most - least, top[..., -1] - top[..., -2]",
    "spread, margin = most - least, top[..., -1] - top.min(axis=-1)",
    "the margin over the worst class, not over the next",
    *VERIFIER,
    CERTIFICATES,
    KNOWN,
)
bug(
    "half-the-distortion-allowed",
    "return evidence.per_unit(evidence.margin > 2 * evidence.largest)",
    "return evidence.per_unit(evidence.margin > evidence.largest)",
    "a certificate that forgets that the next class may gain",
    CERTIFICATES,
    *VERIFIER,
)
bug(
    "markov-with-the-whole-margin",
    "(d2 / (m / 2) ** 2 if d2 else 0.0)",
    "(d2 / m**2 if d2 else 0.0)",
    "a margin m allows a distortion of m/2",
    CERTIFICATES,
)
bug(
    "epsilon-chosen-on-all",
    "    epsilon = choose(first)[1] if first.units > 1 else np.inf\n",
    "    epsilon, rest = choose(evidence)[1], evidence\n",
    "a bound is made of the data that chose it",
    CERTIFICATES,
    "-k",
    "first_fifth",
)
bug(
    "undecided-counts-as-certified",
    "        if decisions[-1].holds is not True:",
    "        if decisions[-1].holds is False:",
    "a plan whose test did not end is certified",
    CERTIFICATES,
    *VERIFIER,
)
bug(
    "half-the-inputs-suffice",
    "    each = 2 if target.quantity.swaps else 1\n",
    "    each = 1\n",
    "a pair takes two inputs",
    CERTIFICATES,
    *VERIFIER,
    BOUNDS,
)
bug(
    "another-rate-of-swaps",
    "packed = bits | packed if digits >> i & 1 else bits & packed",
    "packed = bits & packed if digits >> i & 1 else bits | packed",
    "units are swapped with probability 1 - p",
    *VERIFIER,
    BOUNDS,
    KNOWN,
)
bug(
    "intervention-writes-into-another-value",
    "                        value = value.copy()\n",
    "                        pass\n",
    "an intervention changes the memory of a value that it does not name",
    f"{INTERVENTIONS}::test_a_value_beside_a_view_of_it_stays",
)
bug(
    "groups-of-units-tiled",
    "array = np.repeat(array, group, axis=-1)",
    "array = np.concatenate([array] * group, axis=-1)",
    "a column of a mask stands for every n-th unit",
    INTERVENTIONS,
)
bug(
    "patch-without-its-mask",
    "return blend(value, _part(values, rows).astype(value.dtype), _part(mask, rows))",
    "return blend(value, np.broadcast_to(_part(values, rows).astype(value.dtype), value.shape).copy(), np.ones_like(value, dtype=bool))",
    "a patch replaces units that its mask leaves out",
    INTERVENTIONS,
)
bug(
    "affine-step-transposed",
    "result = np.moveaxis(read @ step.weight.T, -1, place.axis) + slab",
    "result = np.moveaxis(read @ step.weight.T, -1, place.axis)",
    "a plan that is taken literally loses its bias",
    INTERVENTIONS,
    *VERIFIER,
)
bug(
    "distortion-without-its-bias",
    "second = change @ _swapped(site.covariance, gone, p) @ change.T + np.outer(bias, bias)",
    "second = change @ _swapped(site.covariance, gone, p) @ change.T",
    "D2 of constants that are not the means",
    CERTIFICATES,
    *VERIFIER,
    "tests/planning/test_objectives.py",
    "tests/planning/test_selection.py",
    "tests/verification/test_known_answers.py",
)
bug(
    "distortion-of-swapped-units",
    "np.where(kept[:, None] & kept, (1 - p) ** 2 + p**2, np.where(kept[:, None] ^ kept, 1 - p, 1.0))",
    "np.where(kept[:, None] & kept, (1 - p) ** 2, np.where(kept[:, None] ^ kept, 1 - p, 1.0))",
    "two units that are both swapped still vary together",
    CERTIFICATES,
    *VERIFIER,
    "tests/verification/test_known_answers.py",
)
bug(
    "comparison-the-wrong-way",
    "        gains.append((1 + ours - theirs) / 2)",
    "        gains.append((1 + theirs - ours) / 2)",
    "of two plans the worse is better",
    *VERIFIER,
)
bug(
    "small-is-good",
    "return np.asarray(share if self.quantity.at_least else 1 - share)",
    "return np.asarray(share)",
    "a target such as kl<=0.1 is tested the wrong way round",
    CERTIFICATES,
    *VERIFIER,
    BOUNDS,
)
bug(
    "regression-tolerance-doubled",
    "agree, kl = largest <= readout.tolerance, np.full(largest.shape, np.nan)",
    "agree, kl = largest <= 2 * readout.tolerance, np.full(largest.shape, np.nan)",
    "values agree though they are further off than the tolerance",
    *VERIFIER,
    KNOWN,
)
bug(
    "nan-outputs-agree",
    "    if not (np.isfinite(z).all() and np.isfinite(other).all()):",
    "    if False:",
    "models that give NaN agree",
    *VERIFIER,
)
bug(
    "labels-of-the-original",
    "before, after = (evidence.mean(self.readout.logits(z).argmax(axis=2) == truth) for z in self.answers)",
    "after, before = (evidence.mean(self.readout.logits(z).argmax(axis=2) == truth) for z in self.answers)",
    "the accuracies of original and reduced model are mixed up",
    *VERIFIER,
)
bug(
    "hopeless-is-open",
    "    return bool(not left or bounds.refuted(best, [least], delta, weights=full, horizon=horizon)[0])",
    "    return True",
    "a run goes on though its target cannot be shown any more",
    f"{CERTIFICATES}::test_a_target_that_nothing_can_save_is_given_up",
)
bug(
    "weights-of-values-ignored",
    "    u = np.ones((len(x), 1)) if weights is None else weights.reshape(len(x), -1)",
    "    u = np.ones((len(x), 1))",
    "a weighted mean is bounded as a plain one",
    BOUNDS,
)
bug(
    "stakes-look-ahead",
    "        deviation = np.sqrt(spread / count * (total - start))",
    "        deviation = np.sqrt(x.var(axis=0) * (total - start)) + 1e-12",
    "a stake depends on values that are still to come",
    BOUNDS,
)
bug(
    "original-is-its-own-reduction",
    "    if reduced.fingerprint == program.fingerprint:",
    "    if False:",
    "the original verified against itself agrees with everything",
    *VERIFIER,
)
