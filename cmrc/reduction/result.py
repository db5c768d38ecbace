"""What `cmrc.reduce` returns: the sizes, the chosen one, the verdict; as text, as JSON, and as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cmrc._version import __version__
from cmrc.program.check import Check
from cmrc.program.lower import Lowered
from cmrc.program.plan import Plan
from cmrc.program.program import Program
from cmrc.program.reach import Reach
from cmrc.reduction.goals import Goals, Judgement, Measures, Whole
from cmrc.verification.bounds import shown_percent
from cmrc.verification.evidence import Evidence
from cmrc.verification.result import Verification

WORDS = {"macs": "multiply-adds", "bytes": "bytes", "parameters": "parameters", "units": "units per layer"}
LARGE = 0.95  # a size above which there is nothing to gain
ALIKE = 0.9  # an agreement below which a note warns somebody who asked for speed alone
BEYOND = 0.01  # of the multiply-adds: less is not worth a note


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """One point of the frontier: the part of the original that was asked for, its plan, its file, what was measured."""

    share: float
    plan: Plan
    path: Path
    measures: Measures


@dataclass(frozen=True, slots=True)
class Data:
    """What the model was calibrated and judged on."""

    calibration: int
    judged: int
    what: str
    is_random: bool
    digest: str  # of what it was judged on


@dataclass(eq=False, repr=False)
class Reduction:
    """The chosen size and all others. `lowered` is the small model, `plan` the replacements that lead to it."""

    program: Program
    sizes: Sequence[Size]
    chosen: int
    goals: Goals
    whole: Whole
    of: str  # what sizes are parts of
    lowered: Lowered
    check: Check
    verification: Verification | None
    data: Data
    reach: Reach
    declined: Mapping[str, str]  # sites that do not fold, with the reason
    remarks: Sequence[str]
    recipe: Mapping[str, Any]
    seconds: Mapping[str, float]
    evidence: Evidence  # of the chosen size on the held-out rows
    risks: Mapping[
        str, tuple[list[float], int]
    ]  # by site: what each removal adds to the risk, in order; how many are gone
    is_least: bool  # the smallest size is what stays with all units gone that may go
    measures: Measures  # of the chosen size; after recovery, where it was trained

    def __repr__(self) -> str:
        return f"Reduction({self.verdict})"

    @property
    def size(self) -> Size:
        return self.sizes[self.chosen]

    @property
    def recovered(self) -> bool:
        """Whether the chosen size was trained; `size` has the measures of before, `measures` those of after."""
        return self.lowered.recovery is not None

    @property
    def plan(self) -> Plan:
        return self.lowered.plan

    def save(self, path: str | Path, *, overwrite: bool = False, output_names: Sequence[str] | None = None) -> None:
        """Write the small model as ONNX, whole or not at all. What was found about it stands in its metadata."""
        self.lowered.save(path, overwrite=overwrite, results=self._findings(), output_names=output_names)

    def _findings(self) -> dict[str, Any]:
        """What travels with the file: nothing that depends on the machine's speed or on file names."""
        q, check = self.measures.quality, self.check
        quality = {"agreement": q.agreement.to_json(), "at_least": q.bound, "probability": 1 - self.goals.delta,
                   "held_out": self.data.judged, "data": self.data.digest, "random": self.data.is_random, "accuracy": q.accuracy, "metric": q.metric}  # fmt: skip
        findings: dict[str, Any] = {
            "check": {"holds": check.holds, "error": check.error if check.holds else None, "allowed": check.tolerance},
            "quality": quality,
        }
        if self.verification is not None and self.verification.swapped is not None:
            findings["verification"] = {
                "iia": self.verification.iia.to_json(),
                **{key: self.verification.setting[key] for key in ("swaps", "p", "seed", "inputs")},
            }
        return findings

    # ------------------------------------------------------------ the verdict

    @cached_property
    def judgements(self) -> list[Judgement]:
        return self.goals.judge(self.measures, self.whole)

    @cached_property
    def problems(self) -> list[str]:
        """Why the model is not ready."""
        said = [self._unmet(judgement) for judgement in self.judgements if not judgement.met]
        if not self.check.holds:
            said.append(
                f"the small model is not equal to the original with its units replaced ({self.check.error:.1e})"
            )
        if self.data.is_random:
            said.append("it was judged on random numbers; give data= of the kind that the model will see")
        return said

    @property
    def ready(self) -> bool:
        return not self.problems

    @cached_property
    def verdict(self) -> str:
        """One line: whether the goals are met on held-out data, or what is in the way."""
        return f"not ready: {'; '.join(self.problems)}" if self.problems else f"ready: {self._summary()}"

    def _summary(self) -> str:
        m, q = self.measures, self.measures.quality
        parts = [f"{_part(m.parameters, self.whole.parameters)} of the parameters"]
        parts.append(f"{_part(m.macs, self.whole.macs)} of the multiply-adds")
        if m.bytes > self.whole.bytes:
            parts.append(f"a file that is {_percent(m.bytes / self.whole.bytes - 1)} larger")
        if m.speed is not None:
            parts.append(f"{m.speed.speedup.value:.2f} times as fast")
        parts.append(
            f"agrees with the original on {_percent(q.agreement.value)} of {self.data.judged} held-out samples "
            f"(at least {shown_percent(q.bound)} % with probability {1 - self.goals.delta:g})"
        )
        if q.drop is not None:
            name, pair = ("metric", q.metric) if q.metric is not None else ("accuracy", q.accuracy)
            assert pair is not None
            parts.append(f"{name} {pair[0]:.4f} -> {pair[1]:.4f}")
        return ", ".join(parts)

    def _unmet(self, judgement: Judgement) -> str:
        """What is reachable of a goal that is not met, and why."""
        measured = [self.goals.judge(size.measures, self.whole) for size in self.sizes]
        same = [next(j for j in judged if j.goal == judgement.goal) for judged in measured]
        reached = [i for i, j in enumerate(same) if j.met]
        if reached:
            i = (
                reached[0]
                if judgement.goal in {j.goal for j in self.goals.judge_cost(self.measures, self.whole)}
                else reached[-1]
            )
            other = "; ".join(f"{j.goal}: {j.value}" for j in measured[i] if j.goal != judgement.goal)
            return (
                f"{judgement.goal} is not met together with the other goals: {judgement.value}. It is met at "
                f"{self.sizes[i].share:g} of the {WORDS[self.of]} ({same[i].value}{f'; {other}' if other else ''})"
            )
        cost = judgement.goal in {j.goal for j in self.goals.judge_cost(self.measures, self.whole)}
        end = self.sizes[-1 if cost else 0]
        value = same[-1 if cost else 0].value
        why = (
            "that is with all units removed that may be removed"
            if cost and self.is_least
            else f"units that can be replaced reach {_percent(self.reach.share_of_macs)} of the multiply-adds; try smaller sizes, "
            f"frontier={end.share * 2 / 3:.2g},{end.share / 3:.2g}"
            if cost
            else f"{'try larger sizes, frontier=0.98,0.95, or' if end.share < LARGE else 'give'} more data, or ask for less"
        )
        which = "smallest" if cost else "largest"
        return f"{judgement.goal} is out of reach: {value} at the {which} size tried, {end.share:g} of the {WORDS[self.of]}; {why}"

    # ------------------------------------------------------------ for people

    def frontier(self) -> list[tuple[str, ...]]:
        """The rows of the table of sizes, its head first."""
        has_task = self.measures.quality.drop is not None
        task = "metric" if self.measures.quality.metric is not None else "accuracy"
        head = ("", f"of {WORDS[self.of]}", "parameters", "multiply-adds", "file", "ms", "speed-up", "agreement", "KL")
        rows: list[tuple[str, ...]] = [head + ((task,) if has_task else ())]
        shown = [
            (">" if i == self.chosen else "", f"{size.share:g}", size.measures) for i, size in enumerate(self.sizes)
        ]
        if self.recovered and self.measures != self.size.measures:  # in a row of its own, below what it began with
            mark, share, before = shown[self.chosen]
            shown[self.chosen : self.chosen + 1] = [("", share, before), (mark, f"{share}, recovered", self.measures)]
        for mark, share, m in shown:
            q = m.quality
            pair = q.metric or q.accuracy
            rows.append((
                mark,
                share,
                _part(m.parameters, self.whole.parameters),
                _part(m.macs, self.whole.macs),
                _part(m.bytes, self.whole.bytes),
                f"{m.speed.milliseconds.value:.3g}" if m.speed else "",
                f"{m.speed.speedup.value:.2f}" if m.speed else "",
                f"{q.agreement.value:.4f} [{q.agreement.low:.3f}, {q.agreement.high:.3f}]",
                "" if q.kl is None else f"{q.kl:.2g}",
                *((f"{pair[1]:.4f}",) if has_task and pair else ()),
            ))  # fmt: skip
        return rows

    def summary(self) -> list[tuple[str, str, str, str]]:
        """Before and after, for the chosen size."""
        m, w = self.measures, self.whole
        larger = ", larger" if m.bytes > w.bytes else ""
        rows = [
            ("parameters", f"{w.parameters:,}", f"{m.parameters:,}", _part(m.parameters, w.parameters)),
            ("multiply-adds", f"{w.macs:,}", f"{m.macs:,}", _part(m.macs, w.macs)),
            ("file", f"{w.bytes:,} bytes", f"{m.bytes:,} bytes", _part(m.bytes, w.bytes) + larger),
        ]
        if m.speed is not None and w.milliseconds is not None:
            s = m.speed.speedup
            faster = f"{s.value:.2f} times as fast ({s.low:.2f} to {s.high:.2f}), on {m.speed.provider}"
            rows.append(("latency", f"{w.milliseconds:.3g} ms", f"{m.speed.milliseconds.value:.3g} ms", faster))
        q = m.quality
        if q.accuracy is not None:
            rows.append(("accuracy", f"{q.accuracy[0]:.4f}", f"{q.accuracy[1]:.4f}", ""))
        if q.metric is not None:
            rows.append(("metric", f"{q.metric[0]:.4f}", f"{q.metric[1]:.4f}", ""))
        if self.recovered:
            began = self.size.measures.quality
            kl = "" if began.kl is None or q.kl is None else f"; KL {began.kl:.2g} -> {q.kl:.2g}"
            rows.append(
                ("recovery", f"{began.agreement.value:.4f}", f"{q.agreement.value:.4f}", f"agreement by training{kl}")
            )
        low, high = q.agreement.low, q.agreement.high
        rows.append(
            ("agreement", "", f"{q.agreement.value:.4f}", f"with the original; 95 % interval {low:.4f} to {high:.4f}")
        )
        rows.append(
            (
                "certified",
                "",
                f"{q.bound:.4f}",
                f"agreement is at least this, with probability {1 - self.goals.delta:g}",
            )
        )
        return rows

    def notes(self) -> list[str]:
        """What could not be reduced, and what to do about it."""
        said = list(self.remarks)
        beyond = 1 - self.reach.share_of_macs
        if self.declined and beyond > BEYOND:
            said.append(
                f"{len(self.declined)} places do not fold, {_percent(beyond)} of the multiply-adds are out "
                "of reach: `cmrc inspect --all` says what stops each, `cmrc inspect --groups` what must be replaced together"
            )
        if self.measures.bytes > self.whole.bytes:
            said.append(
                f"the file is larger than the original by {self.measures.bytes - self.whole.bytes:,} bytes: what folding adds to the "
                "graph is more than what the weights save; a goal of size= plans by the bytes of the file"
            )
        if self.goals.of_cost and not self.goals.of_quality and self.measures.quality.agreement.value < ALIKE:
            said.append(
                f"no quality was asked for: the small model gives other answers on {_percent(1 - self.measures.quality.agreement.value)} "
                "of the held-out samples; a goal of agreement= or drop= beside the others prevents that"
            )
        stored = [size.measures.parameters for size in self.sizes]
        if self.of == "macs" and (risen := [i for i in range(1, len(stored)) if stored[i] > stored[i - 1]]):
            one, other = (f"{self.sizes[i].share:g}" for i in (risen[0], risen[0] - 1))
            said.append(
                f"{one} of the multiply-adds has more parameters than {other}: these sizes do not count parameters; a goal of "
                "size= plans by bytes instead"
            )
        return said

    def __str__(self) -> str:
        lines = [*_table(self.frontier()), "", *_table([("", "before", "after", ""), *self.summary()])]
        lines += ["", *(f"note: {note}" for note in self.notes())]
        return "\n".join([*lines, "", str(self.check), self.verdict])

    # ------------------------------------------------------------ for machines

    def to_json(self) -> dict[str, Any]:
        return {
            "cmrc": __version__,
            "model": self.program.fingerprint.digest,
            "ready": self.ready,
            "verdict": self.verdict,
            "problems": self.problems,
            "goals": [{"goal": j.goal, "met": j.met, "value": j.value} for j in self.judgements],
            "original": {"parameters": self.whole.parameters, "macs": self.whole.macs, "bytes": self.whole.bytes,
                         "milliseconds": self.whole.milliseconds, "interval": self.whole.interval},
            "sizes_are_parts_of": self.of,
            "chosen": self.size.share,
            "frontier": [{"share": size.share, **(self.measures if size is self.size else size.measures).to_json()} for size in self.sizes],
            "recovery": self.lowered.recovery and {**self.lowered.recovery.to_json(), "before": self.size.measures.to_json()},
            "widths": {site: [row["units"], row["kept"]] for site, row in self.size.plan.made.get("sites", {}).items()},
            "check": {"holds": self.check.holds, "error": self.check.error, "tolerance": self.check.tolerance},
            "verification": None if self.verification is None else self.verification.to_json(),
            "data": {"calibration": self.data.calibration, "held_out": self.data.judged, "what": self.data.what,
                     "random": self.data.is_random, "judged": self.data.digest, "digest": self.size.plan.made.get("data")},
            "delta": self.goals.delta,
            "recipe": dict(self.recipe),
            "reach": {"parameters": self.reach.share_of_parameters, "macs": self.reach.share_of_macs},
            "declined": dict(self.declined),
            "remarks": list(self.remarks),
            "seconds": dict(self.seconds),
        }  # fmt: skip


def _part(after: float, before: float) -> str:
    return f"{after / before:.3f}" if before else ""


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
