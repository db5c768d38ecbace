"""A recipe: everything that decides a plan, as data. Written in YAML, checked against a schema, recorded in the plan.

    preset: joint
    keep: {"blocks.*.mlp.act": 0.5, "head.act": 64}
    multiple_of: 8
    protect: [stem.act]

A preset names an objective, a selection rule and a kind of replacement (paper table 1); each can be given separately.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from cmrc.errors import RecipeError
from cmrc.planning.recipe_file import check_recipe, read_recipe
from cmrc.statistics.drawn import ENOUGH

ObjectiveName = Literal["variance", "logit", "task", "block", "removal", "norm", "taylor", "magnitude", "random"]
SelectName = Literal["bottom", "joint"]
ReplaceName = Literal["zero", "mean", "optimal", "refit", "affine", "learned", "wls", "merge"]
ParentRule = Literal["pearson", "output-pearson", "random", "all"]
LossName = Literal["cross-entropy", "kl", "logit", "squared-error"]
CurvatureName = Literal["auto", "gauss-newton", "full", "monte-carlo"]

STRICT = ConfigDict(extra="forbid")
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Number = Annotated[int, Field(strict=True, ge=1)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Ridge = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Position = Annotated[str, Field(strict=True)] | Annotated[int, Field(strict=True)]
CONSTANT = ("zero", "mean", "optimal", "refit")  # replacements that are constants; the others are affine
KEEP = 0.5  # of the units of each site, if a recipe has neither keep nor budget


def one_of(names: Any) -> str:
    return f"one of {', '.join(names.__args__)}"


@dataclass(frozen=True, slots=True)
class Method:
    """What is minimised, over which sets, by which replacements."""

    objective: ObjectiveName = "logit"
    select: SelectName = "bottom"
    replace: ReplaceName = "mean"
    ridge: float | Literal["loo"] = 1e-6
    drift_ridge: float | None = None  # of the correction for earlier replacements; None: by held-out error
    interchange: float | None = None  # the probability of a swap that affine maps are fitted for
    parents: int = 16
    parent_rule: ParentRule = "pearson"
    gradient: bool = True  # of the loss, in scores and replacements that know its curvature; without it g = 0


AUTO = "auto"  # the preset that suits each site: see `Recipe.at_site`
PRESETS: dict[str, Method] = {
    "vbp": Method("variance"),
    "cmr-logit": Method("logit"),
    "cmr-const": Method("task", "bottom", "optimal"),
    "cmr-const-refit": Method("task", "bottom", "refit"),
    "cmr-affine": Method("task", "bottom", "wls", ridge=1e-2, gradient=False),
    "magnitude": Method("magnitude"),
    "taylor": Method("taylor"),
    "random": Method("random"),
    "reconstruction": Method("logit", "joint", "mean"),
    "reconstruction-task": Method("task", "joint", "mean"),
    "merge": Method("logit", "bottom", "merge"),
    "joint": Method("logit", "joint", "affine"),
    "joint-task": Method("task", "joint", "affine"),
    "joint-interchange": Method("logit", "joint", "affine", interchange=0.5),
    "joint-learned": Method("logit", "joint", "learned", interchange=0.5),
    "heads-remove": Method("removal", "bottom", "zero"),
    "heads-norm": Method("norm", "bottom", "zero"),
    "heads-constant": Method("task", "bottom", "optimal"),
    "heads-block": Method("block", "bottom", "refit"),
}


@dataclass(frozen=True, slots=True)
class Budget:
    """What the whole model may cost afterwards: an `amount` up to 1 is a part of the present cost. Latency is in ms; units are those
    of all sites together."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    of: Literal["parameters", "macs", "bytes", "latency", "units"]
    amount: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


# What every key of a recipe may be, as an error and the schema say it.
ALLOWED = {
    "preset": f"{AUTO}, or one of {', '.join(PRESETS)}",
    "objective": one_of(ObjectiveName),
    "select": one_of(SelectName),
    "replace": one_of(ReplaceName),
    "ridge": 'a number, 0 or more, or "loo"',
    "drift_ridge": "a number, 0 or more",
    "interchange": "the probability of a swap: 0 or more, below 1",
    "parents": "a whole number, 1 or more",
    "parent_rule": one_of(ParentRule),
    "gradient": "true or false",
    "clip": "true or false",
    "clip_scores": "true or false",
    "sites": "a list of site names or globs",
    "protect": "a list of site names or globs",
    "keep": "a part of the units above 0 and up to 1.0, a whole number of units, or either by site or glob",
    "budget": "{of: parameters, macs, bytes, latency or units, amount: a number above 0, up to 1 for a part}",
    "minimum": "a part of the units above 0 and up to 1.0, or a whole number of units",
    "multiple_of": "a whole number, 1 or more, or one by site or glob",
    "schedule": "a list of parts of the units above 0 and up to 1.0, or of whole numbers of units",
    "recompute": "one of auto, never, fits, all",
    "seed": "a whole number, 0 or more",
    "loss": one_of(LossName),
    "curvature": one_of(CurvatureName),
    "draws": "a whole number, 1 or more",
    "rows_per_unit": "a whole number, 0 or more",
    "positions": "all, each, a position, the name of a mask, or one of these by site",
    "batch": "a whole number, 1 or more",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """See the module. What is None follows from the preset."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    preset: str = AUTO
    objective: ObjectiveName | None = None
    select: SelectName | None = None
    replace: ReplaceName | None = None
    ridge: Ridge | Literal["loo"] | None = None
    drift_ridge: Ridge | None = None
    interchange: Annotated[float, Field(strict=True, ge=0, lt=1)] | None = None
    parents: Number | None = None
    parent_rule: ParentRule | None = None
    gradient: Annotated[bool, Field(strict=True)] | None = None
    clip: Annotated[bool, Field(strict=True)] = True  # folded constants stay within the calibrated range
    clip_scores: Annotated[bool, Field(strict=True)] = False  # those that units are scored with, too

    sites: list[str] = field(default_factory=lambda: ["*"])
    protect: list[str] = field(default_factory=list)
    keep: Number | Share | dict[str, Number | Share] | None = None  # a part of the units, or a number; None: `KEEP`
    budget: Budget | None = None  # instead of keep: one budget for all sites
    minimum: Number | Share = 1  # of the units of each site, as in keep
    multiple_of: Number | dict[str, Number] | None = None  # 8 for channels of convolutions, 4 if below 128, 1 elsewhere
    schedule: list[Number | Share] = field(default_factory=list)  # what earlier steps keep; each is scored again
    # after the replacements upstream of a site: fit it again (affine maps towards the original), or score it again too;
    # auto: with the preset auto, data and several sites all, or fits where one ranking decides on several amounts; else never
    recompute: Literal["auto", "never", "fits", "all"] = "auto"

    seed: Seed = 0
    loss: LossName = "cross-entropy"
    curvature: CurvatureName = "auto"
    draws: Number = 8
    rows_per_unit: Seed = ENOUGH  # rows per column that are enough for second moments; 0: all
    positions: Position | dict[str, Position] = "all"
    batch: Number = 256

    def __post_init__(self) -> None:
        if self.preset not in (AUTO, *PRESETS):
            near = difflib.get_close_matches(self.preset, (AUTO, *PRESETS), 1)
            fix = f"did you mean {near[0]!r}?" if near else f"use {ALLOWED['preset']}"
            raise RecipeError(f"the preset {self.preset!r} is not known", fix=fix)
        if self.budget is not None and self.keep is not None:
            raise RecipeError(
                "keep and budget are both given, and each decides how many units stay",
                fix="leave out keep to meet the budget, or leave out budget to keep what keep says",
            )

    @property
    def method(self) -> Method:
        """The preset, with what the recipe changes."""
        names = [f.name for f in dataclasses.fields(Method)]
        return dataclasses.replace(
            PRESETS[self._base], **{n: getattr(self, n) for n in names if getattr(self, n) is not None}
        )

    @property
    def _base(self) -> str:
        """The preset. `auto` is `joint`, unless the recipe puts a method together by itself: then it starts from CMR-Logit."""
        if self.preset != AUTO:
            return self.preset
        return "joint" if (self.objective, self.select, self.replace) == (None, None, None) else "cmr-logit"

    def at_site(self, *, scatter: bool, affine: bool, zero: bool = False) -> Recipe:
        """With `auto` settled: by whether the scatter of the units is known, affine maps fold, and only 0 is free."""
        if self.preset != AUTO:
            return self
        preset = self._base
        if preset == "joint":
            preset = "cmr-logit" if not scatter else "joint" if affine else "reconstruction"
        return dataclasses.replace(self, preset=preset, replace="zero" if zero and not affine else self.replace)

    def for_run(self, *, data: bool, sites: int, ranked_once: bool = False) -> Recipe:
        """With `recompute: auto` settled: by whether there are data that can be read again, and how many sites.

        Units are ranked after the replacements before them, unless a budget, a schedule or several sizes need the ranks before.
        """
        if self.recompute != AUTO:
            return self
        fits = self.preset == AUTO and self._base == "joint" and data and sites > 1
        alone = self.budget is None and not self.schedule and not ranked_once
        return dataclasses.replace(self, recompute=("all" if alone else "fits") if fits else "never")

    @property
    def calibration(self) -> dict[str, Any]:
        """The arguments of `cmrc.calibrate` besides the sites and what to gather there."""
        names = ("positions", "loss", "curvature", "draws", "seed", "rows_per_unit")
        return {"size": self.batch, **{name: getattr(self, name) for name in names}}

    @property
    def needs(self) -> frozenset[str]:
        """What calibration must bring."""
        method = self.method
        needs = {"moments"}
        if method.objective in ("task", "block", "removal", "taylor") or method.replace in ("optimal", "refit", "wls"):
            needs |= {"curvature"}
        if method.objective == "task" or method.replace in ("optimal", "refit"):
            needs |= {"range"}
        if (
            method.replace == "refit"
            or method.objective == "block"
            or (method.select == "joint" and method.objective == "task")
        ):
            needs |= {"coupling"}
        if method.select == "joint" or method.replace in ("affine", "learned", "wls", "merge"):
            needs |= {"scatter"}
        if method.replace in ("learned", "wls") or method.ridge == "loo":
            needs |= {"rows"}
        return frozenset(needs)

    def to_json(self) -> dict[str, Any]:
        """Only what differs from the defaults, and the method in full."""
        plain = dataclasses.asdict(self)
        default = dataclasses.asdict(Recipe())
        changed = {name: value for name, value in plain.items() if value != default[name]}
        return {"preset": self.preset, **changed, **dataclasses.asdict(self.method), "seed": self.seed}


def make_recipe(base: Recipe | Mapping[str, Any] | str | Path | None = None, **options: Any) -> Recipe:
    """A recipe from a file, a mapping or another recipe, with `options` in place of some of its keys."""
    where = ""
    if isinstance(base, (str, Path)):
        where, base = str(base), read_recipe(Path(base))
    if isinstance(base, Recipe):
        base = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    recipe: Recipe = check_recipe(_schema(), {**(base or {}), **options}, ALLOWED, where)
    return recipe


@functools.cache
def _schema() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


def json_schema() -> dict[str, Any]:
    """The schema of a recipe, for editors."""
    schema = _schema().json_schema()
    for name, allowed in ALLOWED.items():
        schema["properties"][name]["description"] = allowed
    return schema
