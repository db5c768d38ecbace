"""Seeded bugs of planning: scores, order, counts, fits, budgets."""

from __future__ import annotations

from tests.mutation.mutant import Table

bug = Table()
OBJECTIVES = ("tests/planning/test_objectives.py", "tests/planning/test_selection.py")
PLANNER = "tests/planning/test_planner.py"
COUNTS = f"{PLANNER}::test_counts_follow_keep_minimum_multiple_and_protection"
BUDGET = (
    f"{PLANNER}::test_a_budget_takes_from_the_site_that_matters_less",
    f"{PLANNER}::test_a_budget_is_met_and_spent_where_it_hurts_least",
)
SCHEDULE = (
    f"{PLANNER}::test_a_schedule_scores_anew_and_keeps_what_is_gone",
    f"{PLANNER}::test_recomputed_statistics_are_those_after_the_replacements_upstream",
)
NUMERICS = "tests/planning/test_numerics.py"
STREAM = "tests/planning/test_stream.py"
PROGRESS = "tests/planning/test_progress.py"

bug(
    "best-units-go-first",
    '    units = np.argsort(score, kind="stable")\n    return Order(units, score[units])',
    '    units = np.argsort(-score, kind="stable")\n    return Order(units, score[units])',
    "the order of the scores is reversed",
    "tests/planning/test_selection.py::test_units_of_equal_score_go_by_number",
)
bug(
    "ties-from-the-end",
    '    units = np.argsort(score, kind="stable")\n    return Order(units, score[units])',
    '    units = len(score) - 1 - np.argsort(score[::-1], kind="stable")\n    return Order(units, score[units])',
    "units of equal score go from the last to the first",
    "tests/planning/test_selection.py::test_units_of_equal_score_go_by_number",
)
bug(
    "pairs-count-once",
    "        cost = own + 2 * cross\n        j = _next(cost, left, first)\n        units[step], added[step], left[j] = j, cost[j], False\n        cross += joint[j]",
    "        cost = own + cross\n        j = _next(cost, left, first)\n        units[step], added[step], left[j] = j, cost[j], False\n        cross += joint[j]",
    "what two units lose together counts once",
    *OBJECTIVES,
)
bug(
    "one-unit-too-few",
    "wanted = max(_part(keep, site.units), _least(site, recipe))",
    "wanted = max(_part(keep, site.units) - 1, _least(site, recipe))",
    "keep is off by one",
    COUNTS,
)
bug(
    "counts-rounded-down",
    "return min(site.units, math.ceil(wanted / step) * step)",
    "return min(site.units, max(step, wanted // step * step))",
    "a multiple is rounded down, below what was to be kept",
    COUNTS,
)
bug(
    "minimum-ignored",
    "    return max(1, _part(recipe.minimum, site.units))",
    "    return 1",
    "fewer units stay than the recipe allows",
    COUNTS,
)
bug(
    "ridge-ignored-by-the-fit",
    "    weight = solve_ridge(among, cross, chosen).T\n",
    "    weight = solve_ridge(among, cross, 0.0).T\n",
    "the ridge of an affine fit has no effect",
    *OBJECTIVES,
    "-k",
    "ridge",
)
bug(
    "ridge-absolute",
    "    scaled = among / np.outer(deviation, deviation)\n    scaled[np.diag_indices(len(scaled))] += max(ridge, 1e-12)",
    "    deviation = np.ones_like(deviation)\n    scaled = among.copy()\n    scaled[np.diag_indices(len(scaled))] += max(ridge, 1e-12)",
    "the ridge depends on the scale of the units",
    *OBJECTIVES,
    "-k",
    "ridge",
)
bug(
    "ridge-ignored-by-the-elimination",
    "    scaled[np.diag_indices(len(scaled))] += ridge + dead",
    "    scaled[np.diag_indices(len(scaled))] += 1e-12 + dead",
    "the ridge of the elimination has no effect",
    *OBJECTIVES,
    "-k",
    "ridge_of_the_elim",
)
bug(
    "ridge-ignored-by-weighted-fits",
    "+= ridge * power\n",
    "+= 0 * power\n",
    "the ridge of a weighted fit has no effect",
    *OBJECTIVES,
    NUMERICS,
)
bug(
    "optimal-constant-sign",
    "        return self.weighted_mean - self.gradient",
    "        return self.weighted_mean + self.gradient",
    "the gradient moves the constant the wrong way",
    *OBJECTIVES,
)
bug(
    "optimal-constant-unclipped",
    '        constant = np.clip(constant, stats.wanted("low", "range"), stats.wanted("high", "range"))',
    "        pass",
    "a constant may leave the range that was seen",
    *OBJECTIVES,
    NUMERICS,
)
bug(
    "flat-units-divide",
    "    flat = bent <= FLAT * float(np.abs(bent).max())",
    "    flat = bent < 0",
    "a unit without curvature divides by it",
    *OBJECTIVES,
    NUMERICS,
)
bug(
    "risk-without-its-half",
    "risk = 0.5 * (constant**2 * h - 2 * constant * ha + haa)",
    "risk = constant**2 * h - 2 * constant * ha + haa",
    "the second order of the risk counts twice",
    *OBJECTIVES,
)
bug(
    "risk-per-row",
    "return np.asarray(risk / stats.samples)",
    "return np.asarray(risk / stats.count)",
    "sites with many positions look cheap",
    *OBJECTIVES,
)
bug(
    "weights-not-squared",
    "(outgoing(c.program, c.stats.columns) ** 2).sum(0)",
    "np.abs(outgoing(c.program, c.stats.columns)).sum(0)",
    "the logit score takes the sum of the weights, not of their squares",
    *OBJECTIVES,
)
bug(
    "bias-without-the-means",
    "    bias = mean - weight @ stats.mean[keep]\n",
    "    bias = mean\n",
    "an affine fit does not pass through the means",
    *OBJECTIVES,
)
bug(
    "swaps-of-both",
    "    changed = ((1 - p) ** 2 + p**2) * among",
    "    changed = (1 - p) ** 2 * among",
    "two units that are both swapped still vary together",
    *OBJECTIVES,
)
bug(
    "error-on-its-own-rows",
    "error = (target - u @ (shrink[:, None] * projected)) / np.maximum(1.0 - leverage, 1e-9)[:, None]",
    "error = target - u @ (shrink[:, None] * projected)",
    "a ridge is chosen by the error on the rows that it was fitted to",
    *OBJECTIVES,
    "-k",
    "leave_one_out or leaving",
)
bug(
    "least-correlated-parents",
    'order = np.argsort(-strength, axis=1, kind="stable")[:, :count]',
    'order = np.argsort(strength, axis=1, kind="stable")[:, :count]',
    "the parents that say least are chosen",
    *OBJECTIVES,
)
bug(
    "merge-slope-of-the-unit",
    "    power = covariance.diagonal()[parent]\n",
    "    power = covariance.diagonal()[replaced]\n",
    "a merged unit is scaled by its own variance, not by its parent's",
    *OBJECTIVES,
)
bug(
    "budget-is-always-a-share",
    "allowed = budget.amount * whole if budget.amount <= 1 else budget.amount",
    "allowed = budget.amount * whole",
    "a budget in MACs or bytes is taken for a share",
    *BUDGET,
)
bug(
    "budget-exceeded",
    "            cost = self.costs.measure(counts)\n            if nearest",
    "            cost = self.costs.measure(counts) / 2\n            if nearest",
    "a plan may cost twice its budget",
    *BUDGET,
)
bug(
    "protected-sites-change",
    "if site.value not in protected and bool",
    "if bool",
    "a protected site is planned like the others",
    COUNTS,
)
bug(
    "elimination-grows",
    "        self.diagonal -= u[t] ** 2",
    "        self.diagonal += u[t] ** 2",
    "what is left is explained better by fewer units",
    *OBJECTIVES,
)
bug(
    "elimination-forgets-folds",
    "        self.norms += -2 * u[t] * product / root + u[t] ** 2 * vv[t, t]",
    "        pass",
    "the output weights after a fold are those before it",
    *OBJECTIVES,
)
bug(
    "drift-the-wrong-way",
    '    apart = stats.arrays["origin"] - stats.mean',
    '    apart = stats.mean - stats.arrays["origin"]',
    "the correction for earlier replacements doubles their error",
    STREAM,
    *OBJECTIVES,
    "tests/planning/test_planner.py",
    "tests/planning/test_numerics.py",
)
bug(
    "refit-worse-than-the-means",
    "return Fit(constant if risk(constant) <= risk(mean) else mean)",
    "return Fit(mean if risk(constant) <= risk(mean) else constant)",
    "of two solutions the worse is taken",
    *OBJECTIVES,
)
bug(
    "stream-without-replacements",
    "        moved = plain if self.moving[level] is self.parts[level] else _outputs_of(self.moving[level], live.moved)",
    "        moved = plain if self.moving[level] is self.parts[level] else _outputs_of(self.parts[level], live.moved)",
    "the stream of values forgets what was replaced",
    STREAM,
)
bug(
    "gone-units-come-back",
    "        by_score[list(gone)] = -np.inf\n",
    "",
    "a schedule may bring back units that are gone",
    *SCHEDULE,
)
bug(
    "means-from-the-first-step",
    "                constants_so_far.clear()  # means follow what is upstream\n                fresh, constants = list(units), _constants(program, r, units, recipe)",
    "                pass",
    "means stay those from before the replacements upstream",
    f"{PLANNER}::test_means_of_an_earlier_step_follow_what_is_replaced_upstream",
)
bug(
    "certified-on-calibration-data",
    "    if probe.digest == stats.digest:",
    "    if False:",
    "a plan is certified on the data that it was made from",
    "tests/planning/test_certified.py::test_what_cannot_be_certified_is_refused",
)
bug(
    "plan-resumed-for-another",
    "            if header.asked != self.asked:",
    "            if False:",
    "a plan continues from the checkpoint of another recipe",
    PROGRESS,
)
bug(
    "resumed-site-without-its-weights",
    '            yield "weight", result.entry.weight',
    '            yield "weight", 0 * result.entry.weight',
    "a plan that resumes loses the weights of finished sites",
    PROGRESS,
)
bug(
    "site-by-site-in-any-order",
    "return sorted(range(len(self.sites)), key=lambda i: self.cut.levels[self.sites[i]])",
    "return sorted(range(len(self.sites)), key=lambda i: -self.cut.levels[self.sites[i]])",
    "sites are replaced from the output to the input",
    STREAM,
    *SCHEDULE,
)
