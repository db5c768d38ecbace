"""`cmrc.reduce`: trace, split the data, calibrate, plan several sizes, measure each, choose, check, verify.

    model ─> sites that fold ─> calibration ─> plans of several sizes ─> lower, judge on held-out rows, time ─> the chosen one

All sizes come from one calibration. What is done stands in a work folder, so that the same call continues after an
interruption, and a call with other goals costs seconds. A site that cannot be used is left out with a remark.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cmrc.errors import HostError, OutOfReachError, RecipeError, ResidueError, StatsError
from cmrc.hosts.protocols import Host, Sizable
from cmrc.ir.graph import Array
from cmrc.planning.planner import plan_sizes
from cmrc.planning.ranking import rank
from cmrc.planning.recipe import Recipe, make_recipe
from cmrc.program.lower import Lowered, lower
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.reach import reach
from cmrc.program.sites import Site
from cmrc.program.trace import trace
from cmrc.reduction.goals import Goals, Measures, Whole
from cmrc.reduction.images import Pictures
from cmrc.reduction.measuring import ROUNDS, SESSIONS, Judge, Metric, Quality, Speed, file_bytes, speeds
from cmrc.reduction.result import WORDS, Data, Reduction, Size
from cmrc.reduction.samples import LIMIT, Rows, first_rows, load_function, read_samples
from cmrc.reduction.workfolder import WorkFolder, digest_of, digest_of_run
from cmrc.statistics.calibrate import calibrate, choose
from cmrc.statistics.stats import Stats
from cmrc.verification.protocol import verify
from cmrc.verification.result import Verification
from cmrc.verification.verifier import HeldOut

FRONTIER = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
FEWEST = 5  # sizes, where fewer can be reached
SHARE = 0.25  # of the data, held out
PRESET = "joint"
CHECKED = 4  # batches on which the small model is compared with the clamped one
TIMING = 20.0  # seconds that timing should take, about
DROPS = 5  # how many times sites that do not fold together are left out of one plan


class Observer(Protocol):
    """Who watches a run: stages by name, work with its length, and remarks."""

    def stage(self, name: str, detail: str) -> None: ...

    def track(self, items: Iterable[Any], count: int | None, what: str) -> Iterable[Any]: ...


class Unobserved:
    """Nobody watches."""

    def stage(self, name: str, detail: str) -> None:
        pass

    def track(self, items: Iterable[Any], count: int | None, what: str) -> Iterable[Any]:
        return items


def reduce(
    model: Any,
    data: Any = None,
    *,
    args: tuple[Any, ...] = (),
    held_out: Any = SHARE,
    speedup: float | None = None,
    size: float | None = None,
    macs: float | None = None,
    latency: float | None = None,
    agreement: float | None = None,
    metric: Metric | str | None = None,
    drop: float | None = None,
    keep: float | None = None,
    pick: float | None = None,
    measured: bool = False,
    delta: float = 0.05,
    frontier: Sequence[float] = FRONTIER,
    sites: str | Sequence[str] = "*",
    protect: Sequence[str] = (),
    preset: str = PRESET,
    refit: bool = True,
    samples: int | None = LIMIT,
    batch: int | None = None,
    seed: int = 0,
    normalise: str | None = None,
    side: int | None = None,
    answer: str | int | None = None,
    reads: str | None = None,
    class_axis: int = -1,
    tolerance: float | None = None,
    threads: int = 1,
    provider: str = "cpu",
    timed: bool = True,
    swaps: int = 0,
    work: str | Path | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Reduction:
    """A small model that meets the goals, chosen among several sizes that were measured on held-out data.

    `model` is anything that `cmrc.trace` takes, with `args` (example inputs) and options for a torch module. `data` are rows of
    any kind (`samples.py`); `held_out` is the part of them that is set apart, or other data. The goals are `speedup`, `size` (of
    the file), `macs`, `latency` in ms, `agreement` with the original, and `drop` of the accuracy or of a `metric(outputs,
    labels)`, higher is better; without any, the smallest model that agrees on 0.98 of the held-out rows. `keep` keeps this
    part of the units of every layer instead, and `pick` takes the size of this share. `answer` names the output that is judged.

    `frontier` are the parts of the multiply-adds (of the bytes, with a goal of `size`) that are tried. `refit=False` saves a pass over the data
    for each size, at some loss. `work` is a folder in which everything is kept for the next call.
    """
    watcher = Unobserved() if observer is None else observer
    goals = Goals(
        speedup=speedup, size=size, macs=macs, latency=latency, agreement=agreement, drop=drop, keep=keep, pick=pick,
        measured=measured, delta=delta,
    ).or_default()  # fmt: skip
    judge_by: Metric | None = load_function(metric) if isinstance(metric, str) else metric
    with _folder(work) as folder:
        clock = _Clock(watcher)
        clock.stage("reading", str(model) if isinstance(model, (str, Path)) else type(model).__name__)
        program = trace(model, args, **options)
        how = Pictures(normalise, side)  # type: ignore[arg-type]
        rows = _split(program, data, held_out, how, seed, samples, batch)
        goals.require_enough(len(rows.judged.numbers))
        run = _Run(
            program, rows, goals, folder, clock, watcher,
            asked=_recipe_options(preset, refit, rows.calibration, seed, protect),
            sites=sites, timing=_Timing(timed, threads, provider), remarks=list(rows.remarks),
        )  # fmt: skip
        reading = {"answer": answer, "reads": reads, "class_axis": class_axis, "tolerance": tolerance}
        named = Path(metric.rpartition(":")[0]).read_text() + metric if isinstance(metric, str) else None
        unnamed = f"{id(metric)} {time.time_ns()}" if callable(metric) else ""  # whose code is not known is run anew
        return run.all(_wanted(frontier, goals), judge_by, named or unnamed, reading, swaps, model)


# ---------------------------------------------------------------- what is asked


@contextmanager
def _folder(work: str | Path | None) -> Iterator[Path]:
    if work is not None:
        yield Path(work)
        return
    with tempfile.TemporaryDirectory(prefix="cmrc-") as folder:
        yield Path(folder)


@dataclass(frozen=True, slots=True)
class _Split:
    calibration: Rows
    judged: Rows
    what: str
    is_random: bool
    remarks: tuple[str, ...]


def _split(
    program: Program, data: Any, held_out: Any, how: Pictures, seed: int, limit: int | None, batch: int | None
) -> _Split:
    inputs = program.graph.inputs
    if {value.name for value in inputs} != set(program.host.inputs):
        raise HostError(
            "a model with nested or constant arguments cannot be reduced by one call",
            fix="calibrate, plan, lower and verify it step by step, or trace a module that takes tensors",
        )
    samples = read_samples(data, inputs, pictures=how, limit=limit, seed=seed)
    if isinstance(held_out, (int, float)):
        if not 0 < held_out < 1:
            raise RecipeError(f"held_out={held_out} is not a part of the data", fix="give held_out=0.25, or other data")
        calibration, judged = samples.split(float(held_out), seed, limit)
        other = samples
    else:
        other = read_samples(held_out, inputs, pictures=how, limit=limit, seed=seed)
        calibration, judged = samples.all(seed, limit), other.all(seed, limit)
    remarks = dict.fromkeys((*samples.remarks, *other.remarks))
    used = len(calibration.numbers) + (len(judged.numbers) if other is samples else 0)
    if used < len(samples):
        remarks[f"{used} of {len(samples)} samples are used: say samples= for more"] = None
    return _Split(
        replace(calibration, size=batch), replace(judged, size=batch), samples.what, samples.is_random, tuple(remarks)
    )


def _recipe_options(preset: str, refit: bool, rows: Rows, seed: int, protect: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {"preset": preset, "seed": seed, "batch": rows.batch, "protect": list(protect)}
    if refit:
        options["recompute"] = "fits"
    return options


def _wanted(sizes: Sequence[float], goals: Goals) -> list[float]:
    """The sizes to try, from large to small. Those that a goal names are among them."""
    if goals.keep is not None:
        return [goals.keep]
    if not sizes or not all(0 < size < 1 for size in sizes):
        raise RecipeError(
            "the sizes are not parts of the model", fix="give numbers between 0 and 1: frontier=0.8,0.6,0.4"
        )
    named = [part for part in (goals.macs, goals.pick, goals.size) if part is not None and part < 1]
    return sorted({round(float(size), 3) for size in (*sizes, *named)}, reverse=True)


@dataclass(frozen=True, slots=True)
class _Timing:
    wanted: bool
    threads: int
    provider: str


@dataclass(slots=True)
class _Clock:
    """Seconds per stage."""

    observer: Observer
    seconds: dict[str, float] = field(default_factory=dict)
    current: str = ""
    begin: float = 0.0

    def stage(self, name: str, detail: str = "") -> None:
        self.stop()
        self.current, self.begin = name, time.perf_counter()
        self.observer.stage(name, detail)

    def stop(self) -> None:
        if self.current:
            spent = time.perf_counter() - self.begin
            self.seconds[self.current] = self.seconds.get(self.current, 0.0) + spent
        self.current = ""


# ---------------------------------------------------------------- the stages


@dataclass(slots=True, eq=False)
class _Run:
    """One reduction in the making."""

    program: Program
    rows: _Split
    goals: Goals
    folder: Path
    clock: _Clock
    observer: Observer
    asked: dict[str, Any]
    sites: str | Sequence[str]
    timing: _Timing
    remarks: list[str]
    shapes: dict[str, tuple[int, ...]] = field(init=False)  # of the inputs, in the data
    sized: Program = field(init=False)  # the model with those sizes: its cost is that of a real run

    def __post_init__(self) -> None:
        row = first_rows(self.rows.calibration, 1)
        self.shapes = {value.name: row[value.name].shape for value in self.program.graph.inputs}
        self.sized = self._with_sizes(self.program.host) if self._is_dynamic() else self.program

    def _is_dynamic(self) -> bool:
        sizes = [size for value in self.program.graph.inputs for size in value.shape[1:]]
        return isinstance(self.program.host, Sizable) and not all(isinstance(size, int) for size in sizes)

    def _with_sizes(self, host: Host) -> Program:
        return Program(host.with_sizes(self.shapes) if isinstance(host, Sizable) else host)

    @property
    def of(self) -> str:
        """What a size is a part of."""
        if self.goals.keep is not None:
            return "units"
        if self.goals.size is not None and self.goals.macs is None:
            return "bytes"
        return "macs" if self.sized.cost().macs else "parameters"

    def all(
        self,
        wanted: Sequence[float],
        metric: Metric | None,
        metric_name: str,
        reading: Mapping[str, Any],
        swaps: int,
        model: Any,
    ) -> Reduction:
        folding, declined = self._sites()
        recipe = make_recipe(**self.asked)
        values = [site.value for site in folding]
        run_digest = digest_of_run(
            self.program.fingerprint, (self.rows.calibration,), {**self.asked, "of": self.of, "sites": values}
        )
        work = WorkFolder.open(self.folder, run_digest)
        if work.emptied:
            self.remarks.append("the work folder held another model, data or recipe: everything was done anew")
        stats = self._statistics(work, recipe, folding)
        self.clock.stage("original", f"{len(self.rows.judged.numbers)} held-out samples")
        judge = Judge(self.program, self.rows.judged, metric=metric, delta=self.goals.delta, **reading)
        self.remarks += judge.remarks
        conditions = digest_of({
            **reading, "delta": self.goals.delta, "metric": metric_name,
            "rows": digest_of_run(self.program.fingerprint, (self.rows.judged,), {}),
        })  # fmt: skip
        whole = self._whole(work, model)
        sizes = self._frontier(work, stats, wanted, judge, conditions)
        whole, sizes = self._time(work, sizes, whole, model)
        chosen = self._choose(sizes, whole)
        lowered, check, verification = self._finish(sizes[chosen], judge, swaps, reading)
        self.clock.stop()
        data = Data(len(self.rows.calibration.numbers), len(judge), self.rows.what, self.rows.is_random)
        reached = reach(self.sized, [site for site in folding if site.value in stats.sites])
        return Reduction(
            self.program, sizes, chosen, self.goals, whole, self.of, lowered, check, verification, data, reached,
            declined, list(dict.fromkeys(self.remarks)), recipe.to_json(), self.clock.seconds,
            judge.evidence(judge.run(lowered)), self._risks(stats, recipe, lowered.plan),
        )  # fmt: skip

    def _sites(self) -> tuple[list[Site], dict[str, str]]:
        """The sites whose units can be replaced, and what stops the others."""
        self.clock.stage("sites", "which units can be replaced")
        known = self.program.sites()
        folding = choose(self.program, self.sites)
        declined = {site.name: site.folds for site in known if site.folding is not None and not site.folding.folds}
        if not folding:
            raise RecipeError(
                f"none of the {len(known)} sites of this model can be replaced and folded away",
                fix="`cmrc inspect` says what stops each of them, and which must be replaced together",
            )
        return folding, declined

    def _statistics(self, work: WorkFolder, recipe: Recipe, sites: Sequence[Site]) -> Stats:
        if work.stats.is_file():
            self.clock.stage("calibration", "done before")
            return Stats.load(work.stats)
        count = len(self.rows.calibration.numbers)
        self.clock.stage("calibration", f"{count} samples at {len(sites)} sites")
        remaining = list(sites)
        while True:
            try:
                stats = calibrate(
                    self.sized, self.rows.calibration, sites=[self._name(site) for site in remaining], need=recipe.needs,
                    **recipe.calibration, checkpoint=work.calibration,
                    watch=lambda parts, length: self.observer.track(parts, length, "calibrating"),
                )  # fmt: skip
                break
            except StatsError as error:
                bad = [site for site in remaining if error.node in (site.name, site.value)]
                if not bad or len(remaining) == 1:
                    raise
                self.remarks.append(f"left out: {bad[0].name}: {error.reason}")
                remaining.remove(bad[0])
                work.calibration.unlink(missing_ok=True)
        stats.save(work.stats)
        return stats

    def _name(self, site: Site) -> str:
        """As the user calls it, unless that name means something else."""
        return site.name if list(self.program.host.names.get(site.name, ())) == [site.value] else site.value

    def _whole(self, work: WorkFolder, model: Any) -> Whole:
        cost = self.sized.cost()
        return Whole(cost.parameters, cost.macs, file_bytes(self._original(work, model)))

    def _original(self, work: WorkFolder, model: Any) -> Path:
        if isinstance(model, (str, Path)):
            return Path(model)
        if not work.original.is_file():
            self.program.save(work.original)
        return work.original

    def _frontier(
        self, work: WorkFolder, stats: Stats, wanted: Sequence[float], judge: Judge, conditions: str
    ) -> list[Size]:
        """A plan, a model and its measures for every size that can be reached."""
        self.clock.stage("sizes", f"{len(wanted)} sizes: plan, fold, judge on {len(judge)} held-out samples")
        least = work.load("reach", work.asked)
        sizes: list[Size] = []
        if least is None:
            try:
                self._measure_sizes(work, stats, wanted, judge, conditions, sizes)
                return sizes
            except OutOfReachError as error:
                least = {"least": error.least}
                work.save("reach", work.asked, least)
        floor = math.ceil(1000 * least["least"]) / 1000
        within = [share for share in wanted if share >= floor]
        if len(within) < FEWEST and floor < 1:  # spread over what there is
            spread = np.linspace(1.0, floor, FEWEST + 1)[1:]
            within = sorted({*within, *(round(float(share), 3) for share in spread)}, reverse=True)
        self.remarks.append(
            f"less than {floor:g} of the {WORDS[self.of]} is out of reach: that is what stays with all units gone that may go"
        )
        if not within:
            raise RecipeError(
                "the units that can be replaced save nothing", fix="`cmrc inspect` says what stops the others"
            )
        sizes.clear()
        self._measure_sizes(work, stats, within, judge, conditions, sizes)
        return sizes

    def _measure_sizes(
        self, work: WorkFolder, stats: Stats, wanted: Sequence[float], judge: Judge, conditions: str, sizes: list[Size]
    ) -> None:
        plans = self._plans(work, stats, wanted)
        for share in self.observer.track(wanted, len(wanted), "sizes"):
            plan = next(plans)
            lowered = None
            if not work.model(share).is_file():
                lowered = self._lower(plan, work.plan(share))
                plan = lowered.plan
                lowered.save(work.model(share), overwrite=True)
            noted = work.load(f"{share:.3f}", conditions)
            if noted is None:
                lowered = lowered or lower(self.program, plan)
                small = lowered.host if self.sized is self.program else self._with_sizes(lowered.host).host
                noted = {
                    "parameters": lowered.report.after.parameters,
                    "macs": Program(small).cost().macs,
                    "quality": judge.quality(lowered).to_json(),
                }
                work.save(f"{share:.3f}", conditions, noted)
            quality = Quality.from_json(noted["quality"])
            size_in_bytes = file_bytes(work.model(share))
            measures = Measures(noted["parameters"], noted["macs"], size_in_bytes, quality, None)
            if sizes and _same(sizes[-1].plan, plan):
                sizes.pop()  # widths come in steps: the same plan, under its smaller name
            sizes.append(Size(share, plan, work.model(share), measures))
            for site, reason in plan.made.get("left_out", {}).items():
                self.remarks.append(f"left out: {site}: {reason}")

    def _plans(self, work: WorkFolder, stats: Stats, wanted: Sequence[float]) -> Iterator[Plan]:
        """The plan of every size: from the work folder, or new. Units are ranked once for all."""
        missing = [share for share in wanted if not work.plan(share).is_file()]
        amounts = [{"keep": s} if self.of == "units" else {"budget": {"of": self.of, "amount": s}} for s in missing]
        fresh = plan_sizes(self.sized, stats, amounts, data=self.rows.calibration, **self.asked)
        for share in wanted:
            if share not in missing:
                plan = Plan.load(work.plan(share))
                self.program.require(plan)
            else:
                sized = next(fresh)
                plan = Plan(self.program, sized.entries, made=sized.made, scores=sized.scores)
                plan.save(work.plan(share))
            yield plan

    def _lower(self, plan: Plan, path: Path) -> Lowered:
        """Lower what folds: sites whose replacements stay in are taken out of the plan, with a remark."""
        for _ in range(DROPS):
            lowered = lower(self.program, plan, residue="keep")
            stuck = {i: residue.reason for residue in lowered.result.residue for i in residue.sources}
            if not lowered.result.residue:
                return lowered
            if not stuck:
                break
            for i, reason in stuck.items():
                self.remarks.append(f"left out: {plan.entries[i].site}: {reason}")
            rest = [entry for i, entry in enumerate(plan.entries) if i not in stuck]
            plan = Plan(self.program, rest, made=plan.made, scores=plan.scores)
            plan.save(path)
        raise ResidueError(
            "the plan does not fold without something that stays at run time",
            fix="leave out sites with protect=, or plan and lower by hand with residue=keep",
        )

    # ------------------------------------------------------------ speed

    def _time(self, work: WorkFolder, sizes: Sequence[Size], whole: Whole, model: Any) -> tuple[Whole, list[Size]]:
        """Every size beside the original, in one process."""
        if not self.timing.wanted:
            if self.goals.speedup is not None or self.goals.latency is not None:
                raise RecipeError("a goal of speed needs timing", fix="leave out timed=False")
            return whole, list(sizes)
        files = {"original": self._original(work, model), **{f"{size.share:.3f}": size.path for size in sizes}}
        count = self.rows.judged.fixed or 1
        feed = {k: v for k, v in first_rows(self.rows.judged, count).items() if k in set(self.program.host.inputs)}
        conditions = digest_of({
            "files": {name: path.stat().st_size for name, path in files.items()}, "threads": self.timing.threads,
            "provider": self.timing.provider,
        })  # fmt: skip
        noted = work.load("speed", conditions)
        if noted is None:
            self.clock.stage("timing", f"{len(files)} files in turns, {self.timing.provider}")
            measured = self._speeds(files, feed)
            noted = {name: speed.to_json() for name, speed in measured.items()}
            work.save("speed", conditions, noted)
        else:
            self.clock.stage("timing", "done before")
        timed = {name: Speed.from_json(each) for name, each in noted.items()}
        sized = [replace(s, measures=replace(s.measures, speed=timed[f"{s.share:.3f}"])) for s in sizes]
        return replace(whole, milliseconds=timed["original"].milliseconds.value), sized

    def _speeds(self, files: Mapping[str, Path], feed: Mapping[str, Array]) -> dict[str, Speed]:
        kind = {"threads": self.timing.threads, "provider": self.timing.provider}
        once = speeds({"original": files["original"]}, "original", feed, **kind, sessions=1, rounds=1)  # type: ignore[arg-type]
        seconds = once["original"].milliseconds.value / 1e3
        rounds = int(np.clip(TIMING / (max(seconds, 2e-3) * len(files) * SESSIONS), 3, ROUNDS))
        watch: Callable[[Any], Any] = lambda items: self.observer.track(items, SESSIONS, "timing")  # noqa: E731
        return speeds(files, "original", feed, **kind, rounds=rounds, watch=watch)  # type: ignore[arg-type]

    def _risks(self, stats: Stats, recipe: Recipe, plan: Plan) -> dict[str, tuple[list[float], int]]:
        """What the selection went by: the risk that each removal adds, given those before it."""
        gone = {entry.value: len(entry.units) for entry in plan.entries}
        risks = {}
        for value, own in stats.sites.items():
            if value in gone:
                site = self.sized.site_of(value, own.columns.axis, own.columns.name)
                order = rank(self.sized, site, own, recipe, ()).order
                risks[own.columns.name] = (np.maximum(order.added, 0.0).tolist(), gone[value])
        return risks

    # ------------------------------------------------------------ the chosen one

    def _choose(self, sizes: Sequence[Size], whole: Whole) -> int:
        if self.goals.pick is not None:
            return int(np.argmin([abs(size.share - self.goals.pick) for size in sizes]))
        return self.goals.choose([size.measures for size in sizes], whole)

    def _finish(
        self, size: Size, judge: Judge, swaps: int, reading: Mapping[str, Any]
    ) -> tuple[Lowered, Any, Verification | None]:
        self.clock.stage("check", f"the chosen size, {size.share:g}")
        lowered = lower(self.program, size.plan)
        names = set(self.program.host.inputs)
        batches = [{k: v for k, v in batch.items() if k in names} for batch in _few(self.rows.judged, CHECKED)]
        check = lowered.check(*batches)
        if not swaps or not len(lowered.plan):
            return lowered, check, None
        self.clock.stage("verify", f"{swaps} swaps")
        data = HeldOut(judge.inputs, judge.labels if judge.truth is not None else None, None)
        own = {
            "class_axis": reading["class_axis"],
            "output": judge.output,
            "reads": judge.readout.kind,
            "tolerance": judge.readout.tolerance or None,
        }
        result = verify(
            self.program, lowered, data, swaps=swaps, delta=self.goals.delta, watch=self.observer.track, **own
        )
        return lowered, check, result


def _same(one: Plan, other: Plan) -> bool:
    return [(e.value, e.units) for e in one.entries] == [(e.value, e.units) for e in other.entries]


def _few(rows: Rows, count: int) -> Iterator[dict[str, Array]]:
    for number, batch in enumerate(rows):
        if number >= count:
            return
        yield batch
