"""What is reduced and on what: the model, its calibration rows and its held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from cmrc.errors import HostError, RecipeError
from cmrc.hosts.protocols import Host, Sizable
from cmrc.ir.graph import Array
from cmrc.program.program import Program
from cmrc.reduction.samples import Reading, Rows, first_rows, read_samples
from cmrc.reduction.workfolder import WorkFolder


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
    shapes: dict[str, tuple[int, ...]] = field(init=False)
    sized: Program = field(init=False)

    def __post_init__(self) -> None:
        row = first_rows(self.rows.calibration, 1)
        self.shapes = {value.name: row[value.name].shape for value in self.program.graph.inputs}
        self.sized = self.at_these_sizes(self.program.host) if self._is_dynamic() else self.program

    def _is_dynamic(self) -> bool:
        sizes = [size for value in self.program.graph.inputs for size in value.shape[1:]]
        return isinstance(self.program.host, Sizable) and not all(isinstance(size, int) for size in sizes)

    def at_these_sizes(self, host: Host) -> Program:
        return Program(host.with_sizes(self.shapes) if isinstance(host, Sizable) else host)

    def macs_of(self, host: Host) -> int:
        return (Program(host) if self.sized is self.program else self.at_these_sizes(host)).cost().macs

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
