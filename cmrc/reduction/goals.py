"""The goals for the small model, whether a size meets them, and which size is chosen.

    speedup=1.5, size=0.6, macs=0.7, latency=5 (ms)       at most so large: met by every smaller size too
    agreement=0.99, drop=0.01                             at least so good: measured on held-out data

With goals of cost alone the largest size that meets them is chosen, which is the best; with goals of quality alone the smallest.
With both, the largest that meets all.

Agreement is certified: its lower bound at level 1 − δ must reach the goal. Sizes are tested from the largest down to the
first that fails, an order that is fixed beforehand, so no correction for their number is needed. `measured=True` takes
the estimate instead. A drop is judged by its estimate, whose interval is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cmrc.errors import CertifyError, RecipeError
from cmrc.verification.bounds import Estimate

DEFAULT_AGREEMENT = 0.98  # measured, where no goal is given
SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Quality:
    """How a reduced model answers beside the original. `bound` is the agreement that is certified at level 1 − δ."""

    agreement: Estimate
    bound: float
    kl: float | None
    closeness: float  # 1 − ‖z − z'‖² / ‖z‖² over all outputs
    accuracy: tuple[float, float] | None  # of the original and the reduced model, where there are labels
    metric: tuple[float, float] | None
    drop: Estimate | None  # of the metric, else of the accuracy; with an interval where it is a mean over rows

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "agreement": self.agreement.to_json(), "drop": self.drop and self.drop.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Quality:
        pairs = {name: tuple(document[name]) if document[name] else None for name in ("accuracy", "metric")}
        estimates = {name: Estimate(*document[name]) if document[name] else None for name in ("agreement", "drop")}
        return cls(**{**document, **pairs, **estimates})


@dataclass(frozen=True, slots=True)
class Speed:
    """Milliseconds of one run, and how many times faster it is than the original, each with a 95 % interval."""

    milliseconds: Estimate
    speedup: Estimate
    provider: str

    def to_json(self) -> dict[str, Any]:
        return {
            "milliseconds": self.milliseconds.to_json(),
            "speedup": self.speedup.to_json(),
            "provider": self.provider,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Speed:
        return cls(Estimate(*document["milliseconds"]), Estimate(*document["speedup"]), document["provider"])


@dataclass(frozen=True, slots=True)
class Measures:
    """Everything that is known about one size of the model."""

    parameters: int
    macs: int
    bytes: int
    quality: Quality
    speed: Speed | None

    def to_json(self) -> dict[str, Any]:
        cost = {"parameters": self.parameters, "macs": self.macs, "bytes": self.bytes}
        return {**cost, "quality": self.quality.to_json(), "speed": self.speed and self.speed.to_json()}


@dataclass(frozen=True, slots=True)
class Whole:
    """The cost of the original, beside which sizes are judged."""

    parameters: int
    macs: int
    bytes: int
    milliseconds: float | None = None
    interval: tuple[float, float] | None = None  # of the milliseconds, 95 %


@dataclass(frozen=True, slots=True)
class Judgement:
    """One goal at one size: whether it is met, and what was measured."""

    goal: str
    met: bool
    value: str


@dataclass(frozen=True, slots=True)
class Goals:
    """What is asked; None is not asked. `pick` names a size by hand, `keep` what every layer keeps."""

    speedup: float | None = None
    size: float | None = None
    macs: float | None = None
    latency: float | None = None
    agreement: float | None = None
    drop: float | None = None
    keep: float | None = None
    pick: float | None = None
    measured: bool = False
    delta: float = field(default=0.05)

    def __post_init__(self) -> None:
        for name in ("size", "macs", "agreement", "keep", "pick"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise RecipeError(
                    f"{name}={value} is not a fraction of the original", fix=f"give a number up to 1: {name}=0.6"
                )
        for name, least in (("speedup", 1.0), ("latency", 0.0)):
            value = getattr(self, name)
            if value is not None and not (value > least and math.isfinite(value)):
                raise RecipeError(f"{name}={value} is not above {least:g}", fix=f"give a larger number: {name}=")
        if self.drop is not None and not 0 <= self.drop < 1:
            raise RecipeError(f"drop={self.drop} is not a loss of the metric", fix="give a number from 0 on: drop=0.01")
        if self.pick is not None and self.keep is not None:
            raise RecipeError("keep= and pick= both name a size", fix="leave out one of keep= and pick=")

    @property
    def of_quality(self) -> bool:
        return self.agreement is not None or self.drop is not None

    @property
    def of_cost(self) -> bool:
        return any(getattr(self, name) is not None for name in ("speedup", "size", "macs", "latency"))

    @property
    def by_hand(self) -> bool:
        return self.pick is not None or self.keep is not None

    def or_default(self) -> Goals:
        """With nothing asked: the smallest model that agrees on 0.98 of what was measured."""
        if self.of_quality or self.of_cost or self.by_hand:
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Goals(**{**values, "agreement": DEFAULT_AGREEMENT, "measured": True})

    def require_enough(self, count: int) -> None:
        """Require enough held-out rows to certify the agreement that is asked for, if all agree."""
        if self.agreement is None or self.measured:
            return
        needed = math.ceil(math.log(self.delta) / math.log(self.agreement)) if self.agreement < 1 else None
        if needed is None:
            raise CertifyError(
                "agreement=1 cannot be certified by any number of samples",
                fix="ask for less: agreement=0.99; or accept the measured agreement: measured=True",
            )
        if count < needed:
            reach = self.delta ** (1 / max(count, 1))
            raise CertifyError(
                f"agreement={self.agreement:g} needs at least {needed} held-out samples to be certified, but there are {count}",
                fix=f"give more data, ask for agreement={math.floor(reach * 1000) / 1000:g}, or accept the measured agreement: measured=True",
            )

    def judge_cost(self, m: Measures, whole: Whole) -> list[Judgement]:
        """Goals that smaller models meet more easily."""
        said = []
        if self.size is not None:
            part = m.bytes / whole.bytes
            said.append(Judgement(f"size {self.size:g}", part <= self.size + SLACK, f"{part:.3f} of the file"))
        if self.macs is not None:
            part = m.macs / max(whole.macs, 1)
            said.append(Judgement(f"macs {self.macs:g}", part <= self.macs + SLACK, f"{part:.3f} of the multiply-adds"))
        if self.speedup is not None:
            value = m.speed.speedup.value if m.speed else 0.0
            shown = f"{m.speed.speedup.value:.2f} times as fast" if m.speed else "not measured"
            said.append(Judgement(f"speedup {self.speedup:g}", value >= self.speedup, shown))
        if self.latency is not None:
            time = m.speed.milliseconds.value if m.speed else math.inf
            shown = f"{time:.3g} ms" if m.speed else "not measured"
            said.append(Judgement(f"latency {self.latency:g} ms", time <= self.latency, shown))
        return said

    def judge_quality(self, m: Measures) -> list[Judgement]:
        """Goals that larger models meet more easily."""
        said, q = [], m.quality
        if self.agreement is not None:
            if self.measured:
                met, shown = q.agreement.value >= self.agreement, f"{q.agreement.value:.4f} measured"
            else:
                met = q.bound >= self.agreement
                shown = f"at least {q.bound:.4f} certified ({q.agreement.value:.4f} measured)"
            said.append(Judgement(f"agreement {self.agreement:g}", met, shown))
        if self.drop is not None:
            loss = math.inf if q.drop is None else q.drop.value
            shown = "not measured: there are no labels and no metric" if q.drop is None else f"{loss:+.4f} measured"
            said.append(Judgement(f"drop {self.drop:g}", loss <= self.drop + SLACK, shown))
        return said

    def judge(self, m: Measures, whole: Whole) -> list[Judgement]:
        return [*self.judge_cost(m, whole), *self.judge_quality(m)]

    def choose(self, sizes: Sequence[Measures], whole: Whole) -> int:
        """Which of these sizes, from large to small. The first of those that come closest where none meets all goals."""
        cheap = [all(j.met for j in self.judge_cost(m, whole)) for m in sizes]
        good = [all(j.met for j in self.judge_quality(m)) for m in sizes]
        certified = good.index(False) if False in good else len(good)  # in the fixed order, up to the first that fails
        good = [i < certified for i in range(len(sizes))]
        both = [i for i in range(len(sizes)) if cheap[i] and good[i]]
        if both:
            return both[0] if self.of_cost else both[-1]
        if self.of_quality:
            return max(certified - 1, 0)  # what is good stands before what is small
        return len(sizes) - 1
