"""The inner units of a model: those that an affine op makes and that end in affine ops, whatever stands between.

Every linear map and convolution starts a chain: the values behind it that hold the same units (activations, norms, pooling,
depthwise convolutions). The last value of a chain whose replacement folds is where the units are asked for. A unit that somebody
else reads on the way (the pooled half of a squeeze-excite block) is replaced there as well. In a grouped convolution the same
share of every group is asked for, since its groups have one size; of a scan with heads the same positions of every head, since its
state is a table of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

import cmrc
from cmrc.ir.graph import Do, Node
from cmrc.passes import pipeline as passes
from cmrc.passes.pipeline import put_dos
from cmrc.program.dry_run import neighbourhood
from cmrc.program.sites import Site

Ask = list[tuple[Site, list[int]]]  # sites, and units of each, that are replaced together
Draw = Callable[[Site], np.random.Generator]
KEEPS_UNITS = ("pointwise", "along", "reshape", "transpose")


def inner_units(program: cmrc.Program, draw: Draw) -> Ask:
    """Half of the units of every chain that folds. Where none does, the widest, so that the refusal says why."""
    asks: Ask = []
    refused: Ask = []
    taken: dict[str, list[int]] = {}
    for chain in chains(program):
        for site in reversed(chain):
            units = half(program, site, draw(site))
            asked = foldable(program, site, units, taken)
            if asked is None and (runs := rows_of_table(program, site)) > 1:
                units = alike_in_rows(site, runs, draw(site))
                asked = foldable(program, site, units, taken)
            if asked is None:
                refused.append((site, units))
                continue
            for place, some in asked:
                if place.value not in taken:
                    asks.append((place, some))
                    taken[place.value] = some
            break
    return asks or sorted(refused, key=lambda ask: -ask[0].units)[:1]


def chains(program: cmrc.Program) -> list[list[Site]]:
    """For every op that makes units, or joins those of several, the values that hold them, in order."""
    starts: dict[str, str] = {}
    chains_of: dict[str, list[Site]] = {}
    for site in program.sites(folds=False):
        node = program.producers[site.value]
        part = node.op == "select" and node.attrs["axis"] == site.axis  # some of the units, as of a fused projection
        read = [before_rounding(program, o) for o in node.values()]
        over = {starts[o] for o in read if o in starts and (part or same_units(program, o, site))}
        if len(over) == 1 and (node.op in KEEPS_UNITS or is_depthwise(node)):
            start = over.pop()
        elif site.units >= 4 and (makes_units(program, node) or (node.op in ("pointwise", "select") and over)):
            start = site.value
        else:
            continue
        starts[site.value] = start
        chains_of.setdefault(start, []).append(site)
    return list(chains_of.values())


def before_rounding(program: cmrc.Program, value: str) -> str:
    """What a value of a quantised model was rounded from: what is rounded holds the same units, and is no site."""
    maker = program.producers.get(value)
    while maker is not None and maker.attrs.get("fn") in ("quantize", "dequantize") and maker.values():
        value = maker.values()[0]
        maker = program.producers.get(value)
    return value


def makes_units(program: cmrc.Program, node: Node) -> bool:
    """An affine op, or a product with weights that each sample looks up (experts)."""
    makers = [program.producers.get(o) for o in node.values()] if node.op == "matmul" else []
    return node.op in ("linear", "conv") or any(maker is not None and maker.op == "embedding" for maker in makers)


def same_units(program: cmrc.Program, value: str, site: Site) -> bool:
    return value in program.axes and program.values[value].shape[program.axes[value]] == site.units


def is_depthwise(node: Node) -> bool:
    return node.op == "conv" and node.attrs["groups"] == node.output.shape[node.attrs["axis"]]


def half(program: cmrc.Program, site: Site, generator: np.random.Generator) -> list[int]:
    """Half of the units; of every group, if a grouped convolution makes or reads them."""
    runs = groups(program, site.value)
    each = site.units // runs
    return sorted(run * each + int(i) for run in range(runs) for i in generator.permutation(each)[: each // 2])


def groups(program: cmrc.Program, value: str) -> int:
    """The number of groups of the grouped convolution next to a value, through ops that keep units."""
    for reader in program.consumers[value]:
        if reader.op == "conv" and not is_depthwise(reader) and reader.attrs["groups"] > 1:
            return int(reader.attrs["groups"])
    node = program.producers.get(value)
    if node is None or not node.inputs or not isinstance(node.inputs[0], str):
        return 1
    if node.op == "conv" and not is_depthwise(node):
        return int(node.attrs["groups"])
    return groups(program, node.inputs[0]) if node.op in KEEPS_UNITS or is_depthwise(node) else 1


def rows_of_table(program: cmrc.Program, site: Site) -> int:
    """The rows of a table of heads and positions that the units were laid out from, as those of a scan; 1 if there is none."""
    waiting, seen = [site.value], set[str]()
    while waiting:
        node = program.producers.get(waiting.pop())
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        before = program.values[str(node.inputs[0])].shape if node.op == "reshape" else ()
        rows, each = (1, *before)[-2:] if before else (1, 1)
        if isinstance(rows, int) and isinstance(each, int) and rows * each == site.units and each > 1:
            return rows
        if node.op == "pointwise":
            waiting += [operand for operand in node.values() if same_units(program, operand, site)]
    return 1


def alike_in_rows(site: Site, rows: int, generator: np.random.Generator) -> list[int]:
    """Half of the positions of a table, the same in every row."""
    each = site.units // rows
    chosen = sorted(int(i) for i in generator.permutation(each)[: each // 2])
    return [row * each + i for row in range(rows) for i in chosen]


def foldable(program: cmrc.Program, site: Site, units: list[int], taken: dict[str, list[int]]) -> Ask | None:
    """What to replace so that these units fold: the site, or the site and the value before it that others read too."""
    stopped = dry_run(program, [(site, units)])
    if not stopped:
        return [(site, units)]
    source = stopped[0].node.inputs[0]
    if stopped[0].node.op != "select" or not isinstance(source, str) or source == site.value:
        return None
    if not same_units(program, source, site):
        return None
    units = taken.get(source, units)
    both = [(program.site_of(source, None), units), (site, units)]
    return None if dry_run(program, both) else both


def dry_run(program: cmrc.Program, asked: Ask) -> Sequence[passes.Residue]:
    """What would stop."""
    around = neighbourhood(program.graph, [site.value for site, _ in asked])
    dos = [Do(s.name, s.value, s.axis, tuple(units), np.full(len(units), 0.37)) for s, units in asked]
    return passes.run(put_dos(around, dos)).residue
