"""What is reduced and on what: the model, its calibration rows and its held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from cmrc.errors import HostError, RecipeError
from cmrc.hosts.protocols import Host, Sizable
from cmrc.ir.graph import Array
from cmrc.program.program import Program
from cmrc.program.sites import Site
from cmrc.reduction.samples import Reading, Rows, first_rows, read_samples
from cmrc.reduction.workfolder import WorkFolder
from cmrc.statistics.batches import SIZE
from cmrc.statistics.columns import positions_at

LONG = 5e11  # multiply-adds of a pass over the calibration rows: tens of seconds on one core
FEW = 64  # calibration rows that every model gets
VALUES = 512 * 2**20  # bytes of all values of a model that one batch may take


@dataclass(frozen=True, slots=True)
class Split:
    """The rows to calibrate on and those to judge on."""

    calibration: Rows
    judged: Rows
    what: str
    is_random: bool
    remarks: tuple[str, ...]


def split_data(program: Program, data: Any, held_out: Any, reading: Reading, *, batch: int | None) -> Split:
    """Rows of the data; `held_out` is the part of them that is set apart, or other data."""
    inputs = program.graph.inputs
    if {value.name for value in inputs} != set(program.host.inputs):
        raise HostError(
            "a model with nested or constant arguments cannot be reduced by one call",
            fix="calibrate, plan, lower and verify it step by step, or trace a module that takes tensors",
        )
    samples, seed, limit = read_samples(data, inputs, reading), reading.seed, reading.limit
    if isinstance(held_out, (int, float)):
        if not 0 < held_out < 1:
            raise RecipeError(f"held_out={held_out} is not a part of the data", fix="give held_out=0.25, or other data")
        calibration, judged = samples.split(float(held_out), seed, limit)
        other = samples
    else:
        other = read_samples(held_out, inputs, reading)
        calibration, judged = samples.all(seed, limit), other.all(seed, limit)
    remarks = dict.fromkeys((*samples.remarks, *other.remarks))
    used = len(calibration.numbers) + (len(judged.numbers) if other is samples else 0)
    if used < len(samples):
        remarks[f"{used} of {len(samples)} samples are used: say samples= for more"] = None
    return Split(
        replace(calibration, size=batch), replace(judged, size=batch), samples.what, samples.is_random, tuple(remarks)
    )


@dataclass(slots=True, eq=False)
class Subject:
    """The model with its rows. `sized` is the model at the sizes of the rows, so that its cost is that of a real run."""

    program: Program
    rows: Split
    model: Any  # as it was given: a path, or a model in memory
    seed: int
    is_trimmed: bool  # few enough rows that a pass over them does not take long
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    sized: Program = field(init=False)

    def __post_init__(self) -> None:
        row = first_rows(self.rows.calibration, 1)
        self.shapes = {value.name: row[value.name].shape for value in self.program.graph.inputs}
        self.sized = self.at_these_sizes(self.program.host) if self._is_dynamic() else self.program
        if self.rows.calibration.size is None:
            count = self._fitting_rows()
            calibration, judged = (replace(rows, size=count) for rows in (self.rows.calibration, self.rows.judged))
            self.rows = replace(self.rows, calibration=calibration, judged=judged)
        if self.is_trimmed:
            self._trim()
        if self._may_leave_out_padding():
            self.rows = replace(
                self.rows, calibration=self.rows.calibration.trimmed(), judged=self.rows.judged.trimmed()
            )

    def _may_leave_out_padding(self) -> bool:
        """Whether texts of one batch may be shorter than those of another: every input with tokens is of any length."""
        samples, tokens = self.rows.calibration.samples, 1
        if samples.mask is None or self.sized is not self.program:
            return False
        return all(len(v.shape) > tokens and isinstance(v.shape[tokens], str) for v in self.program.graph.inputs)

    def _trim(self) -> None:
        """Fewer calibration rows for a large model: the layers are fitted anew for every size, a pass over the rows each."""
        numbers = self.rows.calibration.numbers
        enough = max(FEW, int(LONG // max(self.macs_of(self.program.host), 1)))
        if len(numbers) <= enough:
            return
        some = np.sort(np.random.default_rng(self.seed).choice(numbers, enough, replace=False))
        said = f"{enough} of {len(numbers)} calibration samples are used, for the time that a pass takes: say samples= for more"
        self.rows = replace(
            self.rows, calibration=replace(self.rows.calibration, numbers=some), remarks=(*self.rows.remarks, said)
        )

    def _fitting_rows(self) -> int:
        """So many rows at a time that the values between the layers, which calibration looks at, fit into memory."""
        known = self.sizes
        shapes = [
            [n if isinstance(n, int) else known.get(n, 1) for n in node.output.shape[1:]]
            for node in self.sized.graph.nodes
        ]
        one = sum(4 * math.prod(shape) for shape in shapes)
        return int(min(SIZE, max(1, VALUES // max(one, 1))))

    @property
    def name(self) -> str:
        return Path(self.model).resolve().name if isinstance(self.model, (str, Path)) else type(self.model).__name__

    def _is_dynamic(self) -> bool:
        sizes = [size for value in self.program.graph.inputs for size in value.shape[1:]]
        return isinstance(self.program.host, Sizable) and not all(isinstance(size, int) for size in sizes)

    def at_these_sizes(self, host: Host) -> Program:
        return Program(host.with_sizes(self.shapes) if isinstance(host, Sizable) else host)

    def macs_of(self, host: Host) -> int:
        """The multiply-adds of one row of the data."""
        if self.sized is not self.program:
            return self.at_these_sizes(host).cost().macs
        return Program(host).cost(self.sizes).macs

    @property
    def sizes(self) -> dict[str, int]:
        """The dynamic sizes of the inputs, by name, as they are in one row of the data."""
        return {
            name: size
            for value in self.program.graph.inputs
            for name, size in zip(value.shape, self.shapes[value.name], strict=True)
            if isinstance(name, str)
        }

    def masked(self, sites: Sequence[Site]) -> str | dict[str, str] | None:
        """Where rows are padded texts: the mask of the sites whose positions are those tokens, by site or for all of them."""
        mask = self.rows.calibration.samples.mask
        if mask is None:
            return None
        own = [self.sized.site_of(site.value, site.axis, site.name) for site in sites]
        tokens = self.shapes[mask][1]
        by_token = [
            site for site in own if [self.sizes.get(str(n), n) for n in positions_at(self.sized, site)] == [tokens]
        ]  # fmt: skip
        return mask if len(by_token) == len(own) else {site.value: mask for site in by_token}

    def file(self, work: WorkFolder) -> Path:
        """The model as a file: the one that was given, else one in the work folder."""
        given = Path(self.model) if isinstance(self.model, (str, Path)) else None
        if given is not None and given.is_file():
            return given
        if not work.original.is_file():
            self.program.save(work.original)
        return work.original

    def batches(self, count: int) -> list[dict[str, Array]]:
        """A few batches of held-out rows, as the model takes them."""
        return [self._inputs(batch) for batch in islice(self._judged(), count)]

    def one_run(self) -> dict[str, Array]:
        """The inputs of a run as it is timed: one row, or as many as the model takes."""
        return self._inputs(first_rows(self.rows.judged, self.rows.judged.fixed or 1))

    def _judged(self) -> Iterator[dict[str, Array]]:
        return iter(self.rows.judged)

    def _inputs(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        return {name: batch[name] for name in self.program.host.inputs}
