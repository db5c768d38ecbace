"""`cmrc.reduce`: trace, split the data, calibrate, plan several sizes, measure each, choose, check, verify.

    model ─> sites that fold ─> calibration ─> plans of several sizes ─> lower, judge on held-out rows, time ─> the chosen one

All sizes come from one calibration. What is done stands in a work folder, so that the same call continues after an
interruption, and a call with other goals costs seconds. A site that cannot be used is left out with a remark.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import RecipeError, StatsError
from cmrc.files import write_whole
from cmrc.hosts.onnx.bench import PROVIDERS, size_of, start
from cmrc.planning.ranking import rank
from cmrc.planning.recipe import Recipe, make_recipe
from cmrc.program.lower import Lowered, lower
from cmrc.program.plan import Plan
from cmrc.program.program import trace
from cmrc.program.reach import reach
from cmrc.program.sites import Site
from cmrc.recovery.recover import recover as train_towards_original
from cmrc.reduction.account import account_of
from cmrc.reduction.frontier import FEWEST, LARGER, SHARES, Frontier, wanted_shares
from cmrc.reduction.goals import Goals, Measures, Whole
from cmrc.reduction.images import Pictures
from cmrc.reduction.measuring import EMBEDDING, Judge, Metric
from cmrc.reduction.observer import Clock, Observer, Unobserved
from cmrc.reduction.result import Data, Reduction, Size
from cmrc.reduction.samples import Reading, affordable_rows, load_function
from cmrc.reduction.sounds import Sounds
from cmrc.reduction.subject import Subject, split_data
from cmrc.reduction.texts import Texts
from cmrc.reduction.timing import ORIGINAL, Timing
from cmrc.reduction.workfolder import WorkFolder, digest_of, digest_of_rows, digest_of_run
from cmrc.statistics.calibrate import calibrate, choose
from cmrc.statistics.stats import Stats
from cmrc.verification.protocol import verify
from cmrc.verification.result import Verification
from cmrc.verification.verifier import HeldOut

SHARE = 0.25  # of the data, held out
PRESET = "auto"
CHECKED = 4  # batches on which the small model is compared with the clamped one


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
    frontier: Sequence[float] = SHARES,
    sites: str | Sequence[str] = "*",
    protect: Sequence[str] = (),
    preset: str = PRESET,
    refit: bool = True,
    samples: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    normalise: str | None = None,
    side: int | str | None = None,
    tokenizer: str | Path | None = None,
    length: int | None = None,
    rate: int | None = None,
    seconds: float | None = None,
    answer: str | int | None = None,
    reads: str | None = None,
    class_axis: int = -1,
    tolerance: float | None = None,
    threads: int = 1,
    provider: str = "cpu",
    timed: bool = True,
    swaps: int = 0,
    recover: float | None = None,
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

    Pictures are normalised (`normalise`) and resized (`side`, for a model of any size). Texts need the folder of a `tokenizer` (a model in a
    Hugging Face folder has its own) and are cut at `length` tokens. Audio is read at `rate` in windows of `seconds`.

    `recover` trains a size towards the original, for so many minutes and without labels, and judges it again: the chosen one, or with a goal of
    quality the next smaller ones, one after the other, as long as they are good enough then.

    `frontier` are the parts of the multiply-adds (of the bytes, with a goal of `size`) that are tried. `refit=False` saves a pass over the data
    for each size, at some loss. `work` is a folder in which everything is kept for the next call.
    """
    goals = Goals(
        speedup=speedup, size=size, macs=macs, latency=latency, agreement=agreement, drop=drop, keep=keep, pick=pick,
        measured=measured, delta=delta,
    ).or_default()  # fmt: skip
    if not timed and (goals.speedup is not None or goals.latency is not None):
        raise RecipeError("a speed goal needs timing", fix="leave out timed=False")
    if recover is not None and recover <= 0:
        raise RecipeError(f"recover={recover:g} is not enough time to train", fix="give minutes: recover=5")
    wanted = wanted_shares(frontier, goals)
    judge_by: Metric | None = load_function(metric) if isinstance(metric, str) else metric
    tokenizer, reads = _of_folder(model, tokenizer, reads)
    with _folder(work) as folder:
        clock = Clock(Unobserved() if observer is None else observer)
        clock.stage("reading", str(model) if isinstance(model, (str, Path)) else type(model).__name__)
        program = trace(model, args, **options)
        if timed and isinstance(model, (str, Path)) and Path(model).is_file():
            start(
                Path(model), provider=PROVIDERS.get(provider.lower(), provider)
            )  # refuses it before the work, not after
        most = affordable_rows(program.graph.inputs, program.cost().macs) if samples is None else samples
        reading = Reading(
            most, seed, Pictures.of(normalise, side), Texts(tokenizer, length), Sounds(rate, seconds)
        )  # fmt: skip
        rows = split_data(program, data, held_out, reading, batch=batch)
        replace(goals, delta=_level(goals, recover)).require_enough(len(rows.judged.numbers))
        subject = Subject(program, rows, model, seed, samples is None)
        asked = {"preset": preset, "seed": seed, "batch": subject.rows.calibration.batch, "protect": list(protect)}
        if refit:
            asked["recompute"] = "fits"
        if goals.speedup is not None or goals.latency is not None:
            asked["multiple_of"] = {}  # widths in the steps that are fast, whatever they lose
        run = _Run(
            subject, goals, clock, asked, sites, Timing(timed, threads, provider),
            _Judging(judge_by, _name_of(metric), {"answer": answer, "reads": reads, "class_axis": class_axis, "tolerance": tolerance}),
            swaps, recover, list(subject.rows.remarks),
        )  # fmt: skip
        return run.all(folder, wanted)


def _of_folder(model: Any, tokenizer: str | Path | None, reads: str | None) -> tuple[Path | None, str | None]:
    """What a Hugging Face folder says by itself: its tokenizer, and that a model without a head gives embeddings."""
    config = Path(model) / "config.json" if isinstance(model, (str, Path)) else None
    if config is None or not config.is_file():
        return (None if tokenizer is None else Path(tokenizer)), reads
    kinds = json.loads(config.read_text()).get("architectures") or [""]
    return Path(tokenizer or model), reads or (EMBEDDING if kinds[0].endswith("Model") else None)


def _level(goals: Goals, recover: float | None) -> float:
    """How often a bound may fail. Where sizes are tested as they are, and again after training, each series has half of it."""
    both = recover is not None and goals.agreement is not None and not (goals.measured or goals.by_hand)
    return goals.delta / 2 if both else goals.delta


@contextmanager
def _folder(work: str | Path | None) -> Iterator[Path]:
    if work is not None:
        yield Path(work)
        return
    with tempfile.TemporaryDirectory(prefix="cmrc-") as folder:
        yield Path(folder)


def _name_of(metric: Metric | str | None) -> str:
    """What tells one metric from another between runs."""
    if isinstance(metric, str):
        return Path(metric.rpartition(":")[0]).read_text() + metric
    return f"{id(metric)} {time.time_ns()}" if callable(metric) else ""  # whose code is not known is run anew


@dataclass(frozen=True, slots=True)
class _Judging:
    """By what answers are judged."""

    metric: Metric | None
    name: str
    reading: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Run:
    """A reduction in progress: its stages."""

    subject: Subject
    goals: Goals
    clock: Clock
    asked: dict[str, Any]
    sites: str | Sequence[str]
    timing: Timing
    judging: _Judging
    swaps: int
    minutes: float | None  # of recovery
    remarks: list[str]

    @property
    def of(self) -> str:
        """The quantity of which a size is a fraction."""
        if self.goals.keep is not None:
            return "units"
        if self.goals.size is not None and self.goals.macs is None:
            return "bytes"
        return "macs" if self.subject.sized.cost().macs else "parameters"

    def all(self, folder: Path, wanted: Sequence[float]) -> Reduction:
        subject, rows = self.subject, self.subject.rows
        folding, declined = self._sites()
        self.clock.stage("original", f"{len(rows.judged.numbers)} held-out samples")
        judge = Judge(
            subject.program,
            rows.judged,
            others=rows.calibration,
            metric=self.judging.metric,
            delta=_level(self.goals, self.minutes),
            **self.judging.reading,
        )
        if self.goals.drop is not None and judge.truth is None and self.judging.metric is None:
            raise RecipeError(
                f"drop={self.goals.drop:g} cannot be measured: there are no labels that name classes, and no metric",
                fix="put an array `labels` beside the inputs, or classes into folders, or give metric=script.py:function",
            )
        if judge.anchors is not None:
            self.asked["loss"] = "squared-error"  # an embedding holds no classes
        if positions := subject.masked(folding):
            self.asked["positions"] = positions
        recipe = make_recipe(**self.asked)
        digested = {**self.asked, "sites": [site.value for site in folding]}
        asked = digest_of_run(subject.program.fingerprint, rows.calibration, digested)
        work = WorkFolder.open(folder, asked, self.of)
        if work.emptied:
            self.remarks.append(
                "the work folder held another model, data or recipe, or is from another version of cmrc: everything was done again"
            )
        stats = self._statistics(work, recipe, folding)
        self.remarks += judge.remarks
        judged_rows = digest_of_rows(rows.judged)
        conditions = digest_of({
            **self.judging.reading, "delta": self.goals.delta, "metric": self.judging.name, "rows": judged_rows,
        })  # fmt: skip
        frontier = Frontier(
            subject, work, stats, self.asked, self.of, judge, conditions, self.clock, self.remarks, self.goals
        )
        larger = len(LARGER) if self._may_try_larger(wanted) else 0
        measured = frontier.measure(wanted, self._is_good if self._may_stop(wanted) else None, FEWEST - larger)
        if larger and measured[0].share <= SHARES[0] and not self._is_good(measured[0].measures):
            measured = [*frontier.measure_larger(), *measured]
        whole, sizes = self._time(work, measured)
        chosen = self._choose(sizes, whole)
        chosen, lowered, final = self._recovered(sizes, chosen, whole, judge, work)
        check, verification = self._finish(sizes[chosen], lowered, judge)
        after = judge.run(lowered)
        if remark := judge.about_embeddings(after):
            self.remarks.append(remark)
        self.clock.stop()
        data = Data(len(rows.calibration.numbers), len(judge), rows.what, rows.is_random, judged_rows)
        reached = reach(subject.sized, [site for site in folding if site.value in stats.sites])
        result = Reduction(
            subject.program, sizes, chosen, self.goals, whole, self.of, lowered, check, verification, data, reached,
            declined, list(dict.fromkeys(self.remarks)), recipe.to_json(), self.clock.seconds,
            judge.evidence(after), self._risks(stats, recipe, lowered.plan), sizes[-1].share == frontier.floor, final,
        )  # fmt: skip
        write_whole(work.account, json.dumps(account_of(result, subject.name)).encode())
        return result

    def _is_good(self, measures: Measures) -> bool:
        return all(judgement.met for judgement in self.goals.judge_quality(measures))

    def _may_stop(self, wanted: Sequence[float]) -> bool:
        """Whether smaller sizes need not be tried once some are not good enough: nobody named sizes, or asked what is fast."""
        return tuple(wanted) == SHARES and not self.goals.of_cost and not self.goals.by_hand

    def _may_try_larger(self, wanted: Sequence[float]) -> bool:
        """Whether larger sizes may be tried if not even the largest is good enough: nobody said which sizes to try.

        Not for a certificate: the order in which sizes are tested must not depend on how they turned out.
        """
        certified = self.goals.agreement is not None and not self.goals.measured
        return tuple(wanted) == SHARES and not certified and not self.goals.by_hand

    def _sites(self) -> tuple[list[Site], dict[str, str]]:
        """The sites whose units can be replaced, and what stops the others."""
        self.clock.stage("sites", "which units can be replaced")
        known = self.subject.program.sites()
        folding = choose(self.subject.program, self.sites)
        declined = {site.name: site.folds for site in known if site.folding is not None and not site.folding.folds}
        if not known:
            raise RecipeError(
                "this model has no units to replace: no linear op and no convolution whose weights are stored in it",
                fix="give a model with layers of its own, not one that is quantised or only prepares its inputs",
            )
        if not folding:
            raise RecipeError(
                f"none of the {len(known)} sites of this model can be replaced and folded away",
                fix="`cmrc inspect` shows what stops each of them, and which must be replaced together",
            )
        return folding, declined

    def _statistics(self, work: WorkFolder, recipe: Recipe, sites: Sequence[Site]) -> Stats:
        if work.stats.is_file():
            self.clock.stage("calibration", "done before")
            return Stats.load(work.stats)
        count = len(self.subject.rows.calibration.numbers)
        self.clock.stage("calibration", f"{count} samples at {len(sites)} sites")
        remaining = list(sites)
        while True:
            try:
                stats = calibrate(
                    self.subject.sized, self.subject.rows.calibration, sites=[self._name(site) for site in remaining], need=recipe.needs,
                    **recipe.calibration, checkpoint=work.calibration,
                    watch=lambda parts, length: self.clock.track(parts, length, "calibrating"),
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
        return site.name if list(self.subject.program.names.get(site.name, ())) == [site.value] else site.value

    def _time(self, work: WorkFolder, sizes: Sequence[Size]) -> tuple[Whole, list[Size]]:
        """What the original costs, and the speed of every size beside it."""
        original, cost = self.subject.file(work), self.subject.sized.cost()
        macs = self.subject.macs_of(self.subject.program.host)
        whole = Whole(cost.parameters, macs, size_of(original))
        if not self.timing.wanted:
            return whole, list(sizes)
        files = {ORIGINAL: original, **{f"{size.share:.3f}": size.path for size in sizes}}
        timed = self.timing.measure(files, self.subject.one_run(), work, self.clock)
        sized = [replace(s, measures=replace(s.measures, speed=timed[f"{s.share:.3f}"])) for s in sizes]
        own = timed[ORIGINAL].milliseconds
        return replace(whole, milliseconds=own.value, interval=(own.low, own.high)), sized

    def _choose(self, sizes: Sequence[Size], whole: Whole) -> int:
        if self.goals.pick is not None:
            return int(np.argmin([abs(size.share - self.goals.pick) for size in sizes]))
        return self.goals.choose([size.measures for size in sizes], whole)

    def _recovered(
        self, sizes: Sequence[Size], chosen: int, whole: Whole, judge: Judge, work: WorkFolder
    ) -> tuple[int, Lowered, Measures]:
        """The chosen size; if asked, trained. With a goal of quality that is a smaller one, as long as it is good enough after training."""
        size = sizes[chosen]
        as_it_is = chosen, lower(self.subject.program, size.plan), size.measures
        if self.minutes is None or not len(size.plan):
            return as_it_is
        is_good = self._is_good(size.measures)
        is_cheap = all(judgement.met for judgement in self.goals.judge_cost(size.measures, whole))
        if not self.goals.of_quality or self.goals.by_hand or (self.goals.of_cost and is_good and is_cheap):
            lowered, measures = self._trained(size, judge, work)
            return (chosen, lowered, measures) if self._is_good(measures) or not is_good else as_it_is
        best = as_it_is if is_good else None
        for index in range(chosen + is_good, len(sizes)):
            lowered, measures = self._trained(sizes[index], judge, work)
            if not self._is_good(measures):
                return best or (index, lowered, measures)
            best = index, lowered, measures
            if self.goals.of_cost and all(judgement.met for judgement in self.goals.judge_cost(measures, whole)):
                break
        return best or as_it_is

    def _trained(self, size: Size, judge: Judge, work: WorkFolder) -> tuple[Lowered, Measures]:
        """A size after training towards the original, judged again."""
        self.clock.stage("recovery", f"{size.share:g}: {self.minutes:g} minutes of training towards the original")
        lowered = train_towards_original(
            self.subject.program, lower(self.subject.program, size.plan),
            replace(self.subject.rows.calibration, is_trimmed=False),
            minutes=self.minutes or 0.0, labels=0.0, seed=self.asked["seed"], checkpoint=work.recovery(size.share),
        )  # fmt: skip
        measures = replace(size.measures, quality=judge.quality(lowered))
        agreed = f"{size.measures.quality.agreement.value:.4f} -> {measures.quality.agreement.value:.4f}"
        self.clock.say(f"  {size.share:g}", f"agrees on {agreed}")
        self.remarks.append(f"{size.share:g} {lowered.recovery}; agreement {agreed}")
        return lowered, measures

    def _finish(self, size: Size, lowered: Lowered, judge: Judge) -> tuple[Any, Verification | None]:
        """The chosen size against the clamped model, as it was before any training; then, if asked, under interventions."""
        self.clock.stage("check", f"the chosen size, {size.share:g}")
        check = lower(self.subject.program, size.plan).check(*self.subject.batches(CHECKED))
        if not self.swaps or not len(lowered.plan):
            return check, None
        self.clock.stage("verify", f"{self.swaps} swaps")
        data = HeldOut(judge.inputs, judge.labels if judge.truth is not None else None, judge.counted)
        result = verify(
            self.subject.program, lowered, data, swaps=self.swaps, delta=self.goals.delta, watch=self.clock.track,
            class_axis=self.judging.reading["class_axis"], output=judge.output,
            reads="values" if judge.anchors is not None else judge.readout.kind,
            tolerance=judge.near if judge.anchors is not None else judge.readout.tolerance or None,
        )  # fmt: skip
        return check, result

    def _risks(self, stats: Stats, recipe: Recipe, plan: Plan) -> dict[str, tuple[list[float], int]]:
        """What the selection went by: the risk that each removal adds, given those before it."""
        gone = {entry.value: len(entry.units) for entry in plan.entries}
        risks = {}
        for value, own in stats.sites.items():
            if value in gone:
                site = self.subject.sized.site_of(value, own.columns.axis, own.columns.name)
                order = rank(self.subject.sized, site, own, recipe, ()).order
                risks[own.columns.name] = (np.maximum(order.added, 0.0).tolist(), gone[value])
        return risks
