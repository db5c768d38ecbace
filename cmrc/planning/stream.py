"""The values of sites in their order, each op run once for every batch: of the model, and with the replacements so far.

    batch ─> piece 0 ─> site 1 ─> piece 1 ─> site 2 ─> ...        the model
                           └ do ─> piece 1 ─> site 2 ─ do ─> ...  the same pieces, of the model with what was replaced by then

The graph is cut at the sites (`passes/interchange.py`), and what is live across a cut is held for every batch until the next
one is reached. Batches whose values do not fit are not held: they run from the beginning for every site. Plans of several sizes
share one `Original`, whose pieces do not run again on a batch that it knows.

A replacement that is read by linear ops and convolutions alone is folded into their weights, so that a piece costs no more with it
than without. The site's own value stays whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cmrc.hosts.protocols import Host
from cmrc.ir.graph import Array, Do, Graph, fused_groups
from cmrc.passes.interchange import cut
from cmrc.passes.pipeline import put_dos, sink
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.statistics.batches import Batch
from cmrc.statistics.calibrate import Taps
from cmrc.statistics.columns import Columns, columns_of
from cmrc.statistics.readers import beside
from cmrc.statistics.stats import digest_of_batch
from cmrc.verification.pieces import Part, parts_of

BUDGET = 4 * 2**30  # bytes of values that are held
SHARED = 2 * 2**30  # bytes of the original's values that are held for further plans


@dataclass(slots=True)
class LiveValues:
    """What is live behind the last piece that ran on a batch: in the model, and with replacements."""

    plain: dict[str, Array]
    moved: dict[str, Array]
    key: bytes
    level: int = -1

    @property
    def bytes(self) -> int:
        own = [array for name, array in self.moved.items() if array is not self.plain.get(name)]
        return sum(array.nbytes for array in (*self.plain.values(), *own))


@dataclass(eq=False)
class Original:
    """The model, cut at the sites, and what its pieces gave for a batch: so many bytes of it as `budget` says.

    A batch is known by its contents, since a loader may give others in another pass.
    """

    program: Program
    sites: Sequence[str]
    budget: int = 0
    _outputs: dict[tuple[bytes, int], dict[str, Array]] = field(default_factory=dict)
    _bytes: int = 0  # of all that are held

    def __post_init__(self) -> None:
        self.cut = cut(self.program.graph, self.sites)
        self.parts = parts_of(self.program, self.cut, max(self.cut.levels.values()) + 1)
        self.beside = {site: columns for site in self.sites if (columns := self._beside(site)) is not None}

    def key(self, batch: Batch) -> bytes:
        return digest_of_batch(batch.arrays()) if self.budget else b""

    def outputs(self, key: bytes, level: int, values: dict[str, Array]) -> dict[str, Array]:
        """What the piece of a level gives for the values before it."""
        known = self._outputs.get((key, level))
        if known is not None:
            return known
        outputs = _outputs_of(self.parts[level], values)
        size = sum(array.nbytes for array in outputs.values())
        if self._bytes + size <= self.budget:
            self._outputs[key, level] = outputs
            self._bytes += size
        return outputs

    def _beside(self, site: str) -> Columns | None:
        """What the next op's result is added to, where that is known as early as the site is."""
        columns = beside(self.program, columns_of(self.program, self.program.site_of(site, None)))
        known = {value.name for value in self.program.graph.inputs} - self.cut.free
        for piece in self.cut.pieces[: self.cut.levels[site] + 1]:
            known |= set(piece.outputs)
        return columns if columns is not None and columns.value in known - self.cut.free else None


@dataclass(eq=False)
class Stream:
    """Taps of one site after another, in the order of `order`."""

    original: Original
    budget: int = BUDGET
    _live_values: dict[int, LiveValues | None] = field(default_factory=dict)
    _bytes: int = 0  # of all that are held

    def __post_init__(self) -> None:
        self.program, self.sites = self.original.program, self.original.sites
        self.cut, self.parts, self.beside = self.original.cut, self.original.parts, self.original.beside
        self.moving = self.parts[:1]
        self.reached: int | None = None  # the level of the last site

    def order(self) -> list[int]:
        """The numbers of the sites, upstream before downstream."""
        return sorted(range(len(self.sites)), key=lambda i: self.cut.levels[self.sites[i]])

    def at(self, site: str, host: Host, plan: Plan | None = None) -> Taps:
        """The taps of a site, where `host` is the model with everything replaced that lies before it: by `plan`, if it is given."""
        if site in self.cut.free:
            return Taps(self.program.host, host, [site])
        self.reached = level = self.cut.levels[site]
        new = range(len(self.moving), level + 1)
        anew = host is not self.program.host  # else nothing before it is replaced yet
        if anew and new and plan is not None:
            host_of_pieces = self.program.host.build(self.folded(plan, new))
        else:
            host_of_pieces = host
        for part in self.parts[new.start : new.stop]:
            moving = Part.make(host_of_pieces, part.inputs, part.outputs, part.beyond) if anew else part
            self.moving.append(moving)
        return _AtSite(self, site, host)

    def folded(self, plan: Plan, levels: range) -> Graph:
        """The model with what these pieces read of the replacements: in the weights of their readers, or clamped."""
        graph, consumers = self.program.graph, self.program.consumers
        pieces = [self.cut.pieces[level] for level in levels]
        read = {name for piece in pieces for node in piece.nodes for name in node.values()}
        entries = [entry for entry in plan.entries if entry.value in read]
        fused = fused_groups(graph)
        direct, others = list[Do](), list[Do]()
        for entry in entries:
            weighed = entry.value not in graph.outputs and all(
                node.op in ("linear", "conv") and node.inputs[0] == entry.value and node.origin not in fused
                for node in consumers[entry.value]
            )
            (direct if weighed else others).append(entry)
        return put_dos(sink(put_dos(graph, direct), since=graph), others)

    def values(self, number: int, batch: Batch, level: int) -> LiveValues | None:
        """What is live behind the piece of a level, or None for a batch that does not fit."""
        if number not in self._live_values:
            feeds = self.program.host.bind(batch.inputs)
            first = self._live_values[number] = LiveValues(feeds, feeds, self.original.key(batch))
            self._bytes += first.bytes
        live = self._live_values[number]
        if live is None or live.level >= level:
            return live
        self._bytes -= live.bytes
        while live.level < level:
            live.level += 1
            self._run(live)
        if self._bytes + live.bytes > self.budget:
            self._live_values[number] = None
        else:
            self._bytes += live.bytes
        return live

    @property
    def let_go(self) -> tuple[int, ...]:
        """The batches whose values did not fit."""
        return tuple(number for number, live in self._live_values.items() if live is None)

    def restore(self, parts: Iterable[Batch], let_go: Collection[int], shard: tuple[int, int] = (0, 1)) -> None:
        """Bring the batches of a shard to where an interrupted run had left them: held at the last level, or let go."""
        if self.reached is None:
            return
        for number, batch in zip(itertools.count(*shard), parts, strict=False):
            if number in let_go:
                self._live_values[number] = None
            else:
                self.values(number, batch, self.reached)

    def _run(self, live: LiveValues) -> None:
        level = live.level
        plain = self.original.outputs(live.key, level, live.plain)
        moved = plain if self.moving[level] is self.parts[level] else _outputs_of(self.moving[level], live.moved)
        live.plain, live.moved = (
            self._live({**values, **new}, level) for values, new in ((live.plain, plain), (live.moved, moved))
        )

    def _live(self, values: dict[str, Array], level: int) -> dict[str, Array]:
        """What later pieces read, and the sites of this level with what lies beside them."""
        later = self.parts[level + 1 :]
        read = {name for part in later for name in part.inputs}
        read |= {name for name, made_at in self.cut.levels.items() if made_at == level}
        read |= {columns.value for site, columns in self.beside.items() if self.cut.levels[site] >= level}
        sized = {name for part in later for name in part.sizes} - read
        kept = {name: array for name, array in values.items() if name in read}
        return kept | {name: np.empty_like(array) for name, array in values.items() if name in sized}


def _outputs_of(part: Part, values: dict[str, Array]) -> dict[str, Array]:
    return part.runner.run(values) if part.runner else {}


class _AtSite(Taps):
    """The values of one site: out of the stream where a batch is held, else from the beginning."""

    def __init__(self, stream: Stream, site: str, host: Host) -> None:
        super().__init__(stream.program.host, host, [site])
        self.stream, self.level = stream, stream.cut.levels[site]
        self.beside = stream.beside.get(site)

    def original(self, number: int, batch: Batch) -> Mapping[str, Array]:
        live = self.stream.values(number, batch, self.level)
        return live.plain if live else super().original(number, batch)

    def running(self, number: int, batch: Batch) -> Mapping[str, Array]:
        live = self.stream.values(number, batch, self.level)
        return live.moved if live else super().running(number, batch)
