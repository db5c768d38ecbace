"""`cmrc.verify(program, lowered, data)`, `cmrc.better` and `cmrc.smallest_certified`: runs of swaps, and when they stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import CertifyError, SiteError, VerifyError
from cmrc.ir.graph import Array
from cmrc.one_order import one_order
from cmrc.program.lower import Lowered
from cmrc.program.plan import Plan
from cmrc.program.program import Program, trace
from cmrc.statistics import distributed
from cmrc.verification import bounds
from cmrc.verification.certificates import Search, require_level, smallest
from cmrc.verification.draws import Draw, Schedule, Scope
from cmrc.verification.evidence import Evidence
from cmrc.verification.result import Plain, Verification
from cmrc.verification.targets import Decision, Standing, Target, decide, require_enough
from cmrc.verification.verifier import HeldOut, Verifier

LOOK = 250  # swaps between two looks at a target
FOR_CONTROLS = 500  # swaps that the controls repeat
MASKS = 16  # swaps of a pair, beyond which more of them hardly narrow a certificate
SWAPS = 20_000  # of certified planning, at most for each plan

Watch = Callable[[Iterable[Schedule], int | None, str], Iterable[Schedule]]


def unwatched(parts: Iterable[Schedule], count: int | None, what: str) -> Iterable[Schedule]:
    return parts


@one_order()
def verify(
    program: Any,
    reduced: Lowered | Program | Plan | str | Path,
    data: Any,
    *,
    plan: Plan | str | Path | None = None,
    site: str | Sequence[str] | None = None,
    swaps: int = 2000,
    p: float | Sequence[float] = 0.5,
    seed: int = 0,
    until: str | Target | None = None,
    delta: float = 0.05,
    about: str | Scope = Scope.POPULATION,
    distinct: bool = False,
    stress: float | None = None,
    controls: bool = True,
    watch: Watch = unwatched,
    spread: bool = False,
    **reading: Any,
) -> Verification:
    """Verify a reduced model under `swaps` interchange interventions at rate `p` (several rates take turns).

    `data` are held-out batches as for `cmrc.calibrate`, with labels for the accuracies. Swaps are at every site of the plan
    together, or at those of `site`. With `swaps=0` both models are compared without swaps, which is cheap.

    Statements are about the population that the inputs come from: inputs are paired once, and a pair's swaps are averaged.
    `about="fixed"` is about these very inputs instead (`distinct`: no input meets itself). `stress=4` draws easy inputs four
    times more rarely, and weighs them so much more. With `until="iia>=0.95"` the run stops as soon as the target is decided
    at level 1 − δ, or cannot be shown any more, at most after `swaps`. `Verifier` describes the rest of the arguments.

    `spread` is for processes that torchrun started, all of which call this: each runs its share of the swaps, and all return
    what one process alone would, to the same bits.
    """
    program = trace(program)
    plan = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    model = trace(reduced) if isinstance(reduced, (str, Path)) else reduced
    verifier = Verifier(program, model, data, plan=plan, site=site, **reading)
    asked = Asked(p, None if until is None else Target.of(until), delta, Scope.parse(about))
    asked.require(len(verifier.data), swaps)
    if swaps and not verifier.variables:
        name, reason = next(iter(verifier.not_swapped.items()))
        raise SiteError(reason, node=name, fix="name a site after it: site=, or compare without swaps: swaps=0")
    verifier.truth()  # labels that do not fit are reported before the work
    keep = {v.site: (len(v.keep), v.units) for v in verifier.variables}
    plain = verifier.plain()
    setting = {
        "swaps": swaps, "p": p, "seed": seed, "inputs": len(verifier.data), "sites": dict(verifier.sizes),
        "about": str(asked.scope), "distinct": distinct, "stress": stress,
        "not swapped": verifier.not_swapped,
    }  # fmt: skip
    if not swaps or (asked.target is not None and not asked.target.quantity.swaps):
        decision = None if asked.target is None else decide_plain(asked.target, plain, delta)
        return Verification(keep, None, plain, {}, decision, delta, asked.scope, {**setting, "swaps": 0})
    rng = np.random.default_rng(seed)
    schedule = verifier.schedule(rng, swaps, about=asked.scope, distinct=distinct, stress=stress)
    evidence, decision, repeated = gather(verifier, rng, schedule, asked, watch, spread=spread)
    compared = compare_controls(verifier, repeated, seed) if controls else {}
    setting["swaps"] = len(evidence)
    same = Evidence.join(repeated.result)
    return Verification(keep, evidence, plain, compared, decision, delta, asked.scope, setting, same)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run of swaps must show: at these rates, for this target if there is one, at level 1 − δ, about what."""

    p: float | Sequence[float]
    target: Target | None
    delta: float
    scope: Scope = Scope.POPULATION

    def require(self, inputs: int, swaps: int) -> None:
        """Require that this many inputs and swaps can show the target, before the work."""
        require_level(self.delta)
        if self.target is None:
            return
        require_enough(self.target, self.delta, inputs, self.scope)
        if self.target.quantity.swaps and not swaps:
            raise CertifyError(f"{self.target} needs swaps", fix="ask for swaps, or for agreement, accuracy or drop")


def decide_plain(target: Target, plain: Plain, delta: float) -> Decision:
    """A target that needs no swap, on every input."""
    good = target.good(plain.values(target.name))
    return decide(target, good, delta, horizon=len(good), swaps=0)


@dataclass(frozen=True, slots=True)
class Repeated:
    """The swaps that the controls repeat: the first few of every unit. What they showed, and to a model that ignores them."""

    draws: list[Draw] = field(default_factory=list)
    result: list[Evidence] = field(default_factory=list)
    ignored: list[Evidence] = field(default_factory=list)

    def take(self, draw: Draw, evidence: Evidence, ignored: Evidence, each: int) -> None:
        """From a draw as many as are still wanted; `ignored` is about the first of each unit."""
        left = FOR_CONTROLS - sum(map(len, self.result))
        if left > 0:
            rows = _first_turns(draw, each)[:left]
            self.draws.append(draw.part(rows))
            self.result.append(evidence.part(rows))
            self.ignored.append(ignored.part(slice(left)))


def gather(
    verifier: Verifier,
    rng: np.random.Generator,
    schedule: Schedule,
    asked: Asked,
    watch: Watch = unwatched,
    *,
    spread: bool = False,
) -> tuple[Evidence, Decision | None, Repeated]:
    """Swap by the schedule until the target is decided or hopeless. Of several processes each takes its turn with a piece of it."""
    parts: list[Evidence] = []
    repeated, decision = Repeated(), None
    pieces, each = schedule.parts(LOOK), max(1, FOR_CONTROLS // schedule.units)
    own, processes = distributed.shard() if spread else (0, 1)
    waiting: list[Draw] = []
    for i, piece in enumerate(watch(pieces, len(pieces), "swapping"), 1):
        waiting.append(verifier.draw(rng, piece, asked.p))
        if len(waiting) < processes and i < len(pieces):
            continue
        mine = _swapped(verifier, waiting[own], each) if own < len(waiting) else None
        pairs = distributed.from_each(mine) if spread else [mine]
        for draw, (evidence, ignored) in zip(waiting, filter(None, pairs), strict=True):
            parts.append(evidence)
            repeated.take(draw, evidence, ignored, each)
            if asked.target is not None:
                every = Evidence.join(parts)
                decision = decide(
                    asked.target, asked.target.values(every), asked.delta, horizon=schedule.units, swaps=len(every),
                    weights=every.unit_weights, scope=asked.scope,
                )  # fmt: skip
                if decision.outcome is not Standing.OPEN:
                    return every, decision, repeated
        waiting.clear()
    return Evidence.join(parts), decision, repeated


def _swapped(verifier: Verifier, draw: Draw, each: int) -> tuple[Evidence, Evidence]:
    """What the swaps of a draw show, and the first of each unit to a model that ignores them."""
    before, after = verifier.outputs(draw)
    rows = _first_turns(draw, each)
    some = draw.part(rows)
    return verifier.compare(draw, before, after), verifier.compare(some, before[rows], verifier.answers[1][some.base])


def _first_turns(draw: Draw, each: int) -> Array:
    return np.flatnonzero(draw.schedule.turn < each)[:FOR_CONTROLS]


def compare_controls(verifier: Verifier, repeated: Repeated, seed: int) -> dict[str, Evidence]:
    """What the same swaps show of models that should not agree, and without swaps."""
    draw = Draw.join(repeated.draws)
    controls = {"ignored": Evidence.join(repeated.ignored)}
    if any(v.replaced for v in verifier.variables):
        controls["replaced"] = verifier.swap_replaced(draw)
    controls["random"] = verifier.swap_random(draw, np.random.default_rng([seed, 1]))
    controls["unswapped"] = verifier.unswapped(draw)
    return controls


# ---------------------------------------------------------------- two plans


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which of two plans is better: 0 the first, 1 the second, None where the inputs did not suffice to tell.

    `difference` is the first minus the second; `low` and `high` each hold with probability 1 − δ.
    """

    by: str
    better: int | None
    difference: float
    low: float
    high: float
    units: int
    swaps: int
    delta: float

    def __str__(self) -> str:
        said = {0: "The first is better", 1: "The second is better", None: "Neither is shown to be better"}[self.better]
        return (
            f"{said} by {self.by} (first − second {self.difference:+.4f}, above {self.low:+.4f} and below {self.high:+.4f} "
            f"with probability {1 - self.delta:g} each; {self.swaps} swaps on {self.units} pairs of inputs)."
        )

    def to_json(self) -> dict[str, Any]:
        return {"by": self.by, "better": {0: "first", 1: "second", None: None}[self.better], "difference": self.difference,
                "bounds": [self.low, self.high], "units": self.units, "swaps": self.swaps, "delta": self.delta}  # fmt: skip


def better(
    program: Program,
    first: Lowered | Program | Plan,
    second: Lowered | Program | Plan,
    data: Any,
    *,
    by: str = "iia",
    clip: float = 1.0,
    plans: tuple[Plan | None, Plan | None] = (None, None),
    swaps: int = 2000,
    p: float | Sequence[float] = 0.5,
    seed: int = 0,
    delta: float = 0.05,
    watch: Watch = unwatched,
    **reading: Any,
) -> Comparison:
    """Swap in both until one is shown to be better for the population, at level 1 − δ; both see the same swaps.

    `by` names `iia`, `range`, `samplewise`, `kl` or `d2` (of which a swap counts at most `clip`). Each answer, "the first is
    better" and "the second is better", is wrong with probability at most δ.
    """
    require_level(delta)
    if by not in ("iia", "range", "samplewise", "kl", "d2"):
        raise VerifyError(f"plans cannot be compared by {by!r}", fix="use iia, range, samplewise, kl or d2")
    target = Target(by, 0.5 * clip, clip) if by in ("kl", "d2") else Target(by, 0.5)
    one = Verifier(program, first, data, plan=plans[0], **reading)
    two = Verifier(program, second, one.data, plan=plans[1], **{k: v for k, v in reading.items() if k != "counted"})
    rng = np.random.default_rng(seed)
    schedule = one.schedule(rng, swaps)
    pieces, gains, done = schedule.parts(LOOK), [], 0
    low, high, winner = 0.0, 1.0, None
    for piece in watch(pieces, len(pieces), "comparing"):
        draw = one.draw(rng, piece, p, sizes={**one.sizes, **two.sizes})
        ours, theirs = (target.values(verifier.swap(draw)) for verifier in (one, two))
        gains.append((1 + ours - theirs) / 2)
        done += len(piece)
        gain = np.concatenate(gains)
        low = bounds.lower_any_time(gain, delta, horizon=schedule.units, least=0.5)
        high = bounds.upper_any_time(gain, delta, horizon=schedule.units, most=0.5)
        winner = 0 if low >= 0.5 else 1 if high <= 0.5 else None
        if winner is not None:
            break
    scale = target.limits[1] * (1 if target.quantity.at_least else -1)
    low, middle, high = sorted(scale * (2 * end - 1) for end in (low, float(np.concatenate(gains).mean()), high))
    return Comparison(by, winner, middle, low, high, sum(map(len, gains)), done, delta)


# ---------------------------------------------------------------- the smallest of several plans


def smallest_certified(
    program: Program,
    plans: Iterable[Plan],
    data: Any,
    target: str | Target,
    *,
    delta: float = 0.05,
    swaps: int | None = None,
    p: float | Sequence[float] = 0.5,
    seed: int = 0,
    about: str | Scope = Scope.POPULATION,
    **reading: Any,
) -> Search:
    """The last of these plans, from the one that keeps most to the one that keeps least, whose target is certified.

    `data` must be disjoint from what the plans were calibrated on. `certificates.smallest` says why the search needs no further
    correction. Each plan is taken literally; plans behind the first that fails are not asked for. At most `swaps` for each
    plan: 16 for each pair of inputs, and 20,000, unless given.
    """
    wanted, scope = Target.of(target), Scope.parse(about)
    asked = Asked(p, wanted, delta, scope)
    counted = reading.pop("counted", None)
    held_out = data if isinstance(data, HeldOut) else HeldOut.collect(data, program.host.inputs, counted)
    most = min(SWAPS, MASKS * (len(held_out) // 2)) if swaps is None and scope is Scope.POPULATION else swaps or SWAPS
    asked.require(len(held_out), most)
    rng = np.random.default_rng(seed)

    def test(plan: Plan) -> Decision:
        verifier, own = Verifier(program, plan, held_out, **reading), rng.spawn(1)[0]
        if not wanted.quantity.swaps:
            return decide_plain(wanted, verifier.plain(), delta)
        schedule = verifier.schedule(own, most, about=scope)
        _, decision, _ = gather(verifier, own, schedule, asked)
        assert decision is not None
        return decision

    search = smallest(plans, test)
    if not search.decisions:
        raise CertifyError("there are no plans to choose from", fix="give plans from large to small")
    return search
