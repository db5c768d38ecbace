"""A recipe: everything that decides a plan, as data. Written in YAML, checked against a schema, recorded in the plan.

    preset: joint
    keep: {"blocks.*.mlp.act": 0.5, "head.act": 64}
    multiple_of: 8
    protect: [stem.act]

A preset names an objective, a selection rule and a replacement class (paper table 1); each can be given on its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from cmrc.errors import RecipeError

ObjectiveName = Literal["variance", "logit", "task", "removal", "taylor", "magnitude", "random"]
SelectName = Literal["bottom", "joint"]
ReplaceName = Literal["zero", "mean", "optimal", "refit", "affine", "wls", "merge"]
ParentRule = Literal["pearson", "output-pearson", "random", "all"]
STRICT = ConfigDict(extra="forbid", strict=False)


@dataclass(frozen=True, slots=True)
class Method:
    """What is minimised, over which sets, by which replacements."""

    objective: ObjectiveName = "logit"
    select: SelectName = "bottom"
    replace: ReplaceName = "mean"
    ridge: float | Literal["loo"] = 1e-6
    drift_ridge: float | None = None  # of what makes up for earlier replacements: kept units over rows, without one
    interchange: float | None = None  # the probability of a swap that affine maps are fitted for
    parents: int = 16
    parent_rule: ParentRule = "pearson"


PRESETS: dict[str, Method] = {
    "vbp": Method("variance"),
    "cmr-logit": Method("logit"),
    "cmr-const": Method("task", "bottom", "optimal"),
    "cmr-const-refit": Method("task", "bottom", "refit"),
    "cmr-affine": Method("task", "bottom", "wls", ridge=1e-2),
    "magnitude": Method("magnitude"),
    "taylor": Method("taylor"),
    "random": Method("random"),
    "reconstruction": Method("logit", "joint", "mean"),
    "merge": Method("logit", "bottom", "merge"),
    "joint": Method("logit", "joint", "affine"),
    "joint-task": Method("task", "joint", "affine"),
    "joint-interchange": Method("logit", "joint", "affine", interchange=0.5),
    "heads-remove": Method("removal", "bottom", "zero"),
    "heads-constant": Method("task", "bottom", "optimal"),
}


@dataclass(frozen=True, slots=True)
class Budget:
    """What the whole model may cost afterwards: `amount` up to 1 is a part of what it costs now. Latency is in ms."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    of: Literal["parameters", "macs", "bytes", "latency"]
    amount: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """See the module. What is None follows from the preset."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    preset: str = "cmr-logit"
    objective: ObjectiveName | None = None
    select: SelectName | None = None
    replace: ReplaceName | None = None
    ridge: float | Literal["loo"] | None = None
    drift_ridge: float | None = None
    interchange: float | None = None
    parents: int | None = None
    parent_rule: ParentRule | None = None
    clip: bool = True  # constants stay within the calibrated range

    sites: list[str] = field(default_factory=lambda: ["*"])
    protect: list[str] = field(default_factory=list)
    keep: int | float | dict[str, int | float] = 0.5  # a part of the units, or a whole number of them; by site or glob
    budget: Budget | None = None  # instead of keep: one budget for all sites
    minimum: int | float = 1  # of a site's units, likewise
    multiple_of: int | dict[str, int] | None = None  # 8 for channels of convolutions, 1 elsewhere
    schedule: list[int | float] = field(default_factory=list)  # what is kept at earlier steps, each scored anew
    # after the replacements upstream of a site: fit it anew (affine maps towards the original), or score it anew too
    recompute: Literal["never", "fits", "all"] = "never"

    seed: int = 0
    loss: str = "cross-entropy"
    curvature: str = "auto"
    draws: int = 8
    positions: str | int | dict[str, str | int] = "all"
    batch: int = 256

    def __post_init__(self) -> None:
        _require(self.preset in PRESETS, f"there is no preset {self.preset!r}", f"say one of {', '.join(PRESETS)}")
        keeps = [*self.schedule, *(self.keep.values() if isinstance(self.keep, dict) else [self.keep])]
        fits = all(k > 0 and (isinstance(k, int) or k <= 1) for k in [*keeps, self.minimum])
        _require(fits, "keep, minimum and schedule are parts up to 1.0, or whole numbers of units", "write 0.5, or 64")
        _require(self.budget is None or self.budget.amount > 0, "a budget must be above 0", "give a part, or a number")
        swaps = self.interchange is None or 0 <= self.interchange < 1
        _require(swaps, f"interchange is {self.interchange}", "give the probability of a swap, below 1")

    @property
    def method(self) -> Method:
        """The preset with what the recipe says otherwise."""
        names = [f.name for f in dataclasses.fields(Method)]
        return dataclasses.replace(
            PRESETS[self.preset], **{n: getattr(self, n) for n in names if getattr(self, n) is not None}
        )

    @property
    def calibration(self) -> dict[str, Any]:
        """What `cmrc.calibrate` is told besides the sites and what to gather there."""
        names = ("positions", "loss", "curvature", "draws", "seed")
        return {"size": self.batch, **{name: getattr(self, name) for name in names}}

    @property
    def needs(self) -> frozenset[str]:
        """What calibration must bring."""
        method = self.method
        found = {"moments"}
        if method.objective in ("task", "removal", "taylor") or method.replace in ("optimal", "refit", "wls"):
            found |= {"curvature"}
        if method.objective == "task" or method.replace in ("optimal", "refit"):
            found |= {"range"}
        if method.replace == "refit" or (method.select == "joint" and method.objective == "task"):
            found |= {"coupling"}
        if method.select == "joint" or method.replace in ("affine", "wls", "merge"):
            found |= {"scatter"}
        if method.replace == "wls" or method.ridge == "loo":
            found |= {"rows"}
        return frozenset(found)

    def to_json(self) -> dict[str, Any]:
        """Only what differs from the defaults, and the method in full."""
        plain = dataclasses.asdict(self)
        default = dataclasses.asdict(Recipe())
        told = {name: value for name, value in plain.items() if value != default[name]}
        return {"preset": self.preset, **told, **dataclasses.asdict(self.method), "seed": self.seed}


def _require(holds: bool, reason: str, fix: str) -> None:
    if not holds:
        raise RecipeError(reason, fix=fix)


def make_recipe(base: Recipe | Mapping[str, Any] | str | Path | None = None, **options: Any) -> Recipe:
    """A recipe from a file, a mapping or another recipe, with some of it said otherwise."""
    where = ""
    if isinstance(base, (str, Path)):
        where, base = str(base), _read(Path(base))
    if isinstance(base, Recipe):
        base = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    told = {**(base or {}), **options}
    try:
        return _schema().validate_python(told)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "recipe"
        known = ", ".join(f.name for f in dataclasses.fields(Recipe))
        odd = first["type"] in ("unexpected_keyword_argument", "extra_forbidden")
        reason = f"{name!r} is not part of a recipe" if odd else f"{name}: {first['msg'].lower()}"
        raise RecipeError(reason, at=where, fix=f"a recipe has {known}") from error


def _schema() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


def json_schema() -> dict[str, Any]:
    """The schema of a recipe, for editors."""
    return _schema().json_schema()


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(f"cannot be read: {error}", at=str(path), fix="give a YAML file") from error
    if not isinstance(found, dict):
        raise RecipeError("is not a mapping of names to values", at=str(path), fix="write lines like `keep: 0.5`")
    return found
