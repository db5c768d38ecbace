"""`cmrc.plan`: from a model and its statistics to a plan.

    for each step of the schedule, for each site:
        statistics ─> objective ─> order of removal ─> how many (keep, or a share of the budget) ─> replacement ─> do

The plan records the recipe, the seed, the digest of the data and the score of every unit. The same inputs give the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cmrc.errors import ObjectiveError, SiteError, StatsError
from cmrc.hosts.protocols import Host
from cmrc.ir.graph import Array
from cmrc.one_order import one_order
from cmrc.planning.apart import BUDGET, plan_apart
from cmrc.planning.certified import KEEPS, Certify, certified, for_swaps, require_plain
from cmrc.planning.constants import with_best_orders, with_orders_for
from cmrc.planning.counts import counts_of_steps, final_counts, require_budget
from cmrc.planning.probe import LossProbe
from cmrc.planning.progress import Progress, SiteResult, SpreadProgress, remove_checkpoint
from cmrc.planning.ranking import Ranked, for_site, rank
from cmrc.planning.recipe import Budget, Recipe, make_recipe
from cmrc.planning.record import record_of_plan, record_of_replacements
from cmrc.planning.replacements import replace_units
from cmrc.planning.stream import SHARED, Original, Stream
from cmrc.planning.usable import lacks_a_need, moments_of_data, named_sites, require_usable, sites_of, stats_of
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.statistics import distributed
from cmrc.statistics.batches import batches, in_batches_of_model
from cmrc.statistics.calibrate import BY_DERIVATIVES, Taps, Watch, calibrate, unwatched
from cmrc.statistics.columns import columns_of, position_of
from cmrc.statistics.readers import elements
from cmrc.statistics.site_stats import SiteStats
from cmrc.statistics.stats import Stats


@one_order()
def plan(
    program: Program,
    stats: Stats | None = None,
    *,
    data: Any = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    watch: Watch = unwatched,
    certify: str | None = None,
    delta: float = 0.05,
    held_out: Any = None,
    keeps: Sequence[int | float] = KEEPS,
    reading: Mapping[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    keep_checkpoint: bool = False,
    spread: bool = False,
    **options: Any,
) -> Plan:
    """A plan by a recipe, or by a preset and the keys of a recipe as options: `preset="joint", keep=0.5`.

    `stats` come from `cmrc.calibrate`. Without them, and for a schedule or `recompute`, this function calibrates on `data`.
    Sites that nobody named are those of the statistics, or all that fold; one that cannot be scored is left out, and
    `plan.made["left_out"]` says why. A site that was named and cannot be scored is an error.

    `certify="iia>=0.95"` finds the smallest plan that is certified to meet this target at level 1 − `delta` on `held_out`
    data. It tries the shares to keep in `keeps` from large to small; `reading` holds arguments of `cmrc.verify` (`site`,
    `output`, `tolerance`).

    `checkpoint` is a folder for the statistics and for every site that is done. If this call is interrupted, the same
    call continues from there, to the same bits; the folder is removed at the end. With `keep_checkpoint` it stays, until
    `remove_checkpoint` is called once the plan is saved.

    `spread` is for processes that torchrun started, all of which call this: each runs its share of the batches, and all return
    the same plan. The first process alone writes the checkpoint.
    """
    chosen = make_recipe(recipe, **options)
    data = in_batches_of_model(data, program.graph.inputs)
    if stats is not None and stats.fingerprint is not None:
        fix = "calibrate this model, or plan for the model that was calibrated"
        stats.fingerprint.require(program.fingerprint, "", what="the statistics were", fix=fix)
    sites, apart = sites_of(program, chosen, stats), sites_of(program, chosen, stats, apart=True)
    if not sites and (certify is not None or chosen.budget is not None):
        raise SiteError("the model cannot be cut at any site that folds", fix="say how many units stay: keep=")
    again = data is not None and not isinstance(data, Iterator)
    if certify is not None:
        require_plain(chosen, checkpoint)
        chosen = for_swaps(chosen, certify)
    chosen = chosen.for_run(data=again and certify is None, sites=len(sites))
    if certify is not None:
        known = (
            stats
            if stats is not None
            else _Planning(program, data, chosen, sites, watch, spread=spread).first_statistics()
        )
        asked = Certify(
            certify, held_out, delta, seed=chosen.seed, keeps=keeps, calibration=data, reading=reading or {}
        )
        given = {"recipe": chosen, "data": data, "watch": watch}
        return certified(program, known, lambda keep: plan(program, known, **given, keep=keep), asked)
    kind = SpreadProgress if spread else Progress
    progress = None if checkpoint is None else kind.start(Path(checkpoint), program, chosen, stats, data)
    planning = _Planning(program, data, chosen, sites, watch, progress, spread=spread)
    if chosen.budget is not None:
        planning.left_out |= {site.name: BUDGET for site in apart}
    result = planning.run(stats) if sites else planning.result
    if chosen.budget is None and apart:
        probe = LossProbe(program, chosen, data, watch)
        result = plan_apart(
            program, chosen, apart, planning, stats, lambda ranked: final_counts(program, [ranked], chosen, probe)[0]
        )
    if checkpoint is not None and not keep_checkpoint and not (spread and distributed.shard()[0]):
        remove_checkpoint(Path(checkpoint))
    return result


def plan_sizes(
    program: Program,
    stats: Stats,
    amounts: Sequence[Mapping[str, Any]],
    *,
    data: Any = None,
    watch: Watch = unwatched,
    **options: Any,
) -> Iterator[Plan]:
    """The plans of one recipe for several amounts, each a `keep` or a `budget`."""
    planner = SizePlanner(program, stats, data, options, watch)
    planner.require(amounts)
    for amount in amounts:
        yield planner.plan(amount)


@dataclass(eq=False)
class SizePlanner:
    """Plans of several sizes by one recipe. Units are ranked, and losses measured, once for all of them.

    A size is also tried as one that leaves out all that the next larger one leaves out, and more.
    """

    program: Program
    stats: Stats
    data: Any
    options: Mapping[str, Any]  # of the recipe, without an amount
    watch: Watch = unwatched
    _counts: dict[tuple[str, float], list[int]] = field(default_factory=dict)  # that go, by budget

    def require(self, amounts: Sequence[Mapping[str, Any]]) -> None:
        """That every budget can be met, found before any loss is measured."""
        for amount in amounts:
            require_budget(self.program, self._scored, self._recipe(amount), self._probe)

    @one_order()
    def plan(self, amount: Mapping[str, Any]) -> Plan:
        recipe, ranked = self._recipe(amount), list(self._ranked)
        first = self._first  # its sites are those that were ranked
        planning = _Planning(
            self.program, self.data, recipe, first.sites, self.watch, left_out=first.left_out,
            larger=self._larger(recipe.budget), original=self._original,
        )  # fmt: skip
        result = planning.replace_in_steps(self.stats, ranked, self._probe, recorded=self.stats)
        self.remember(amount, result)
        return result

    def remember(self, amount: Mapping[str, Any], plan: Plan) -> None:
        """A plan of this amount, from which smaller ones may continue."""
        budget, sites = self._recipe(amount).budget, plan.made["sites"]
        if budget is not None and all(r.site.name in sites for r in self._scored):
            counts = [r.site.units - int(sites[r.site.name]["kept"]) for r in self._scored]
            self._counts[budget.of, budget.amount] = counts

    def _larger(self, budget: Budget | None) -> list[int] | None:
        """The units that the next larger size replaces."""
        amounts = [a for of, a in self._counts if budget is not None and of == budget.of and a > budget.amount]
        return self._counts[budget.of, min(amounts)] if budget is not None and amounts else None

    def _recipe(self, amount: Mapping[str, Any]) -> Recipe:
        recipe = make_recipe(None, **self.options, **amount)
        count = len(sites_of(self.program, recipe, self.stats))
        return recipe.for_run(data=self.data is not None, sites=count, ranked_once=True)

    @cached_property
    def _first(self) -> _Planning:
        recipe = self._recipe({})
        apart = {site.name: BUDGET for site in sites_of(self.program, recipe, self.stats, apart=True)}
        sites = sites_of(self.program, recipe, self.stats)
        return _Planning(self.program, self.data, recipe, sites, self.watch, left_out=apart)

    @cached_property
    def _scored(self) -> list[Ranked]:
        return self._first.rank_what_can_be(self.stats)

    @cached_property
    def _ranked(self) -> list[Ranked]:
        return with_best_orders(self._scored, self._first.recipe, self._probe)

    @cached_property
    def _probe(self) -> LossProbe:
        return LossProbe(self.program, self._first.recipe, self.data, self.watch)

    @cached_property
    def _original(self) -> Original:
        return Original(self.program, [site.value for site in self._first.sites], SHARED)


@dataclass(slots=True, eq=False)
class _Planning:
    """A plan that is being made: step by step of the schedule, and site by site within a step."""

    program: Program
    data: Any
    recipe: Recipe
    sites: list[Site]
    watch: Watch
    progress: Progress | None = None
    result: Plan = field(init=False)
    constants: dict[str, dict[int, Array]] = field(init=False)  # by site: what the replaced units became
    left_out: dict[str, str] = field(default_factory=dict)  # by site: why it cannot be scored
    larger: Sequence[int] | None = None  # how many units of each site a larger size leaves out
    original: Original | None = None  # shared with the plans of other sizes
    spread: bool = False  # over the processes that torchrun started

    def __post_init__(self) -> None:
        self.result = Plan(self.program)
        self.constants = {site.value: {} for site in self.sites}

    def run(self, given: Stats | None) -> Plan:
        if given is None and self._in_one_pass():
            return self._rank_along_stream()
        stats = self.first_statistics() if given is None else given
        probe = LossProbe(self.program, self.recipe, self.data, self.watch, progress=self.progress)
        ranked = with_best_orders(self.rank_what_can_be(stats), self.recipe, probe)
        return self.replace_in_steps(stats, ranked, probe, recorded=stats if given is None else given)

    def replace_in_steps(self, stats: Stats, ranked: list[Ranked], probe: LossProbe, *, recorded: Stats) -> Plan:
        """Decide how many units go, and replace them step by step of the schedule."""
        final = self._final_counts(ranked, probe)
        ranked = with_orders_for(ranked, final, probe)
        steps = [*counts_of_steps(self.recipe, ranked), final]
        for step, counts in enumerate(steps):
            if step:
                stats = self._statistics(step)
                ranked = self._rank(stats)
            self._replace(step, ranked, counts)
        self._recorded(recorded, ranked, final)
        for r, count, earlier in zip(ranked, final, steps[-2] if len(steps) > 1 else [0] * len(ranked), strict=True):
            known = stats_of(stats, r.site)  # a site that was done before an interruption holds no statistics itself
            self.result.made["sites"][r.site.name] |= record_of_replacements(
                self.program, self.recipe, known, r.order.units[earlier:count]
            )
        return self.result

    def _recorded(self, stats: Stats, ranked: Sequence[Ranked], counts: Sequence[int]) -> Plan:
        self.result.made = record_of_plan(self.recipe, stats, ranked, counts, self.left_out)
        self.result.scores = {r.site.name: r.order.by_unit() for r in ranked}
        return self.result

    def _in_one_pass(self) -> bool:
        """Whether every site can be ranked when the stream reaches it, which saves a pass over the data: where nothing is decided
        by several sites together, and all of them are refitted."""
        recipe = self.recipe
        if recipe.recompute == "never" or recipe.schedule or recipe.budget is not None or self.progress is not None:
            return False
        if self.data is None or recipe.needs & BY_DERIVATIVES:
            return False
        try:
            columns = [columns_of(self.program, site, position_of(recipe.positions, site)) for site in self.sites]
        except StatsError:
            return False
        return all(
            for_site(self.program, site, c, recipe, elements(self.program, c)).method.replace == "affine"
            for site, c in zip(self.sites, columns, strict=True)
        )

    def _rank_along_stream(self) -> Plan:
        """Rank and replace the units of one site after the other."""
        stream = Stream(self._original)
        probe = LossProbe(self.program, self.recipe, None, self.watch)
        named, ranked, counts = named_sites(self.program, self.recipe), dict[int, Ranked](), dict[int, int]()
        recorded: Stats | None = None
        refused: ObjectiveError | StatsError | None = None
        for i in stream.order():
            site = self.sites[i]
            if recorded is None:
                taps = stream.at(site.value, self.program.host)
                gathered = recorded = self._calibrate([site], self.recipe.needs, taps=taps)
            else:
                taps = self._taps_of_moved(site, stream, plain=self.recipe.recompute == "fits")
                gathered = self._calibrate([site], self._needs(stream), taps=taps)
            moved, halves = _together(gathered[site.value], taps)
            try:
                plain = taps.unmoved or moved
                require_usable(plain, site)
                ranked[i] = self._rank_site(site, plain)
            except (ObjectiveError, StatsError) as error:
                if site.value in named:
                    raise
                refused = refused or error
                self.left_out[site.name] = error.reason
                continue
            (counts[i],) = final_counts(self.program, [ranked[i]], self.recipe, probe)
            ranked[i] = dataclasses.replace(ranked[i], stats=moved, halves=halves)
            self._replace_units(ranked[i], counts[i])
        if refused is not None and not ranked:
            raise refused
        assert recorded is not None
        self.sites = [self.sites[i] for i in sorted(ranked)]
        return self._recorded(recorded, [ranked[i] for i in sorted(ranked)], [counts[i] for i in sorted(ranked)])

    @property
    def _original(self) -> Original:
        return self.original or Original(self.program, [site.value for site in self.sites])

    def _final_counts(self, ranked: Sequence[Ranked], probe: LossProbe) -> list[int]:
        """How many units go in the end. Found once: a latency would be another one after an interruption."""
        counts = None if self.progress is None else self.progress.load_counts()
        if counts is None:
            counts = final_counts(self.program, ranked, self.recipe, probe, self.larger)
            if self.spread:
                counts = distributed.from_each(counts)[0]  # a latency is another one in each process
            if self.progress is not None:
                self.progress.save_counts(counts)
        return counts

    def statistics_of(self, site: Site) -> Stats:
        """Of one site, with what is replaced so far."""
        return self._calibrate([site], self.recipe.needs)

    def first_statistics(self) -> Stats:
        """Of all sites, in the model itself."""
        return self._statistics(0)

    def _statistics(self, step: int) -> Stats:
        """Of all sites, with what is replaced before this step."""
        if self.progress is None:
            return self._calibrate(self.sites, self.recipe.needs)
        stats = self.progress.load_stats(step)
        if stats is None:
            checkpoint = None if len(self.result) else self.progress.calibration
            stats = self._calibrate(self.sites, self.recipe.needs, checkpoint=checkpoint)
            self.progress.save_stats(step, stats)
        return stats

    def rank_what_can_be(self, stats: Stats) -> list[Ranked]:
        """The sites that can be scored. The others are left out, unless the recipe names them."""
        named = named_sites(self.program, self.recipe)
        ranked, first = [], None
        for site in self.sites:
            try:
                known = stats_of(stats, site)
                require_usable(known, site)
                ranked.append(self._rank_site(site, known))
            except (ObjectiveError, StatsError) as error:
                if site.value in named or lacks_a_need(stats, self.recipe):
                    raise
                first = first or error
                self.left_out[site.name] = error.reason
        if first is not None and not ranked:
            raise first
        self.sites = [r.site for r in ranked]
        return ranked

    def _rank(self, stats: Stats) -> list[Ranked]:
        return [self._rank_site(site, stats[site.value]) for site in self.sites]

    def _rank_site(self, site: Site, stats: SiteStats) -> Ranked:
        with moments_of_data(site):
            return rank(self.program, site, stats, self.recipe, tuple(self.constants[site.value]))

    def _replace(self, step: int, ranked: list[Ranked], counts: Sequence[int]) -> None:
        """Replace units of one site after the other; with `recompute` each after those upstream of it."""
        stream = Stream(self._original) if self.recipe.recompute != "never" else None
        done: SiteResult | None = None
        for i in range(len(self.sites)) if stream is None else stream.order():
            site = self.sites[i]
            earlier = None if self.progress is None else self.progress.load_site(step, i)
            if earlier is not None:
                if i and stream is not None:
                    self._taps(stream, site)  # so that every piece of the stream is that of its moment
                ranked[i] = earlier.applied_to(ranked[i])
                self._take(ranked[i], earlier)
                done = earlier
                continue
            if done is not None and stream is not None:
                own = batches(self.data, self.program.host.inputs, size=self.recipe.batch, shard=self._shard)
                stream.restore(own, done.let_go, self._shard)
                done = None
            if i and stream is not None and self._is_moved(counts[i]):
                taps = self._taps_of_moved(site, stream)
                moved, halves = _together(self._calibrate([site], self._needs(stream), taps=taps)[site.value], taps)
                if self.recipe.recompute == "all":
                    ranked[i] = self._rank_site(site, moved)
                ranked[i] = dataclasses.replace(ranked[i], stats=moved, halves=halves)
            self._replace_units(ranked[i], counts[i])
            if self.progress is not None:
                self.progress.save_site(step, i, ranked[i], self._result_of(ranked[i], stream))

    def _is_moved(self, count: int) -> bool:
        """Whether statistics after earlier replacements decide anything at a site of which so many units go."""
        return count > 0 or self.recipe.recompute == "all"

    def _replace_units(self, ranked: Ranked, count: int) -> None:
        own = self.constants[ranked.site.value]
        with moments_of_data(ranked.site):
            self.result = replace_units(self.program, ranked, count, self.result, own)
        if self.spread:  # unlike processors round unlike
            self.result.entries = distributed.from_each(self.result.entries)[0]

    def _taps_of_moved(self, site: Site, stream: Stream, *, plain: bool = False) -> Taps:
        """The values of a site after the replacements before it: by every other batch where a fit needs both halves; with
        `plain` its statistics in the model itself are gathered as well."""
        needs, host = self._needs(stream), self._host() or self.program.host
        taps = self._taps(stream, site, host) or Taps(self.program.host, host, [site.value])
        columns = columns_of(self.program, site, position_of(self.recipe.positions, site))
        if "drift" in needs and self.recipe.method.drift_ridge is None:
            taps.halves = (SiteStats(columns, needs), SiteStats(columns, needs))
        if plain:
            taps.unmoved = SiteStats(columns, self.recipe.needs)
        taps.read_anew = False
        return taps

    def _take(self, ranked: Ranked, result: SiteResult) -> None:
        others = [entry for entry in self.result.entries if entry.value not in ranked.values]
        self.result = Plan(self.program, [*others, *([] if result.entry is None else [result.entry])])
        self.constants[ranked.site.value] = result.constants

    def _result_of(self, ranked: Ranked, stream: Stream | None) -> SiteResult:
        entry = next((entry for entry in self.result.entries if entry.value in ranked.values), None)
        let_go = () if stream is None else stream.let_go
        return SiteResult(
            entry, self.constants[ranked.site.value], ranked.scores, ranked.order, ranked.stats.how, let_go
        )

    def _needs(self, stream: Stream | None) -> frozenset[str]:
        """What to gather; of a site that a stream has reached, also how it has drifted."""
        needs = self.recipe.needs
        if stream is None or self.recipe.method.replace != "affine":
            return needs
        if self.recipe.recompute == "all":
            return needs | {"drift"}
        return needs - {"curvature", "coupling", "range"} | {"drift"}

    def _host(self) -> Host | None:
        return self.program.clamped(self.result) if len(self.result) else None

    def _taps(self, stream: Stream, site: Site, host: Host | None = None) -> Taps | None:
        """The values of a site from the stream; derivatives need a run of the whole model."""
        if self._needs(stream) & BY_DERIVATIVES:
            return None
        plan = self.result if len(self.result) else None
        return stream.at(site.value, host or self._host() or self.program.host, plan)

    def _calibrate(
        self, sites: Sequence[Site], need: frozenset[str], *, taps: Taps | None = None, checkpoint: Path | None = None
    ) -> Stats:
        """The statistics of sites, in the form of the model that `host` runs."""
        if self.data is None:
            raise StatsError(
                "there are no data to calibrate on",
                fix="give data=, or stats= and neither a schedule nor recompute",
            )
        stats = calibrate(
            self.program,
            self.data,
            sites=[site.value for site in sites],
            need=need,
            **self.recipe.calibration,
            host=self._host() if taps is None else taps.host,
            taps=taps,
            watch=self.watch,
            checkpoint=checkpoint,
            shard=self._shard,
        )
        if not self.spread:
            return stats
        if taps is not None:
            taps.halves = tuple(map(distributed.all_merge_site, taps.halves))
            taps.unmoved = None if taps.unmoved is None else distributed.all_merge_site(taps.unmoved)
        return distributed.all_merge(stats)

    @property
    def _shard(self) -> tuple[int, int]:
        return distributed.shard() if self.spread else (0, 1)


def _together(stats: SiteStats, taps: Taps) -> tuple[SiteStats, tuple[SiteStats, ...]]:
    """The statistics of all batches, and of both halves where they were gathered apart and there are several batches."""
    if not taps.halves:
        return stats, ()
    first, second = taps.halves
    return (first.merge(second), taps.halves) if second.count else (first, ())
