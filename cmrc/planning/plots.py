"""The scores on which the selection of a plan is based, with the cut at each site: `cmrc plan ... --plot scores.png`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from cmrc.errors import PlanError
from cmrc.files import write_picture
from cmrc.program.plan import Plan


def plot_scores(plan: Plan, path: str | Path) -> None:
    """One panel per site: the units by score, or by the risk that each added in its turn; first those that were replaced."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("matplotlib is not installed", fix="pip install 'cmrc[plot]'") from error
    if not plan.scores:
        raise PlanError("the plan has no scores to plot", at=plan.source, fix="make it with cmrc.plan")
    across = min(3, len(plan.scores))
    down = math.ceil(len(plan.scores) / across)
    figure = Figure(figsize=(4.2 * across, 3.0 * down), layout="constrained")
    for i, (site, scores) in enumerate(plan.scores.items()):
        panel = figure.add_subplot(down, across, i + 1)
        gone = np.zeros(len(scores), dtype=bool)
        for entry in plan.entries:
            if entry.site == site:
                gone[list(entry.units)] = True
        order = np.lexsort((scores, ~gone))
        place = np.arange(len(scores))
        for chosen, label, colour in ((gone, "replaced", "tab:red"), (~gone, "kept", "tab:blue")):
            shown = chosen[order]
            panel.scatter(place[shown], scores[order][shown], s=6, color=colour, label=f"{label}: {int(shown.sum())}")
        if scores.min() > 0:
            panel.set_yscale("log")
        panel.set(title=site, xlabel="units, replaced ones first", ylabel=_went_by(plan))
        panel.legend(loc="best", fontsize="small")
    write_picture(figure, Path(path))


def _went_by(plan: Plan) -> str:
    recipe = plan.made.get("recipe", {})
    objective = str(recipe.get("objective", "score"))
    return objective if recipe.get("select", "bottom") == "bottom" else f"{objective}: risk added by its removal"
