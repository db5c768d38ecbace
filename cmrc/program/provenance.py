"""Where a lowered file comes from: what its metadata record, and whether the record is true.

cmrc.version   of cmrc
cmrc.source    fingerprint of the model that was lowered
cmrc.plan      digest of the do's
cmrc.recipe    digest of the recipe that made the plan, if one did
cmrc.data      digest of its calibration data
cmrc.versions  versions of the libraries that computed and wrote the weights
cmrc.check     whether it equals the model with its units replaced, as JSON, if that was checked
cmrc.quality, cmrc.verification    how it answered on held-out data, as JSON, if that was measured
cmrc.recovered what training after lowering did, if there was any: losses, steps, samples

Lowering is deterministic. So the record is checked by lowering again: the same model and plan give the same file. Of a torch model there
are two ways to write it (`exported.py`), and one of them gives the file. After a recovery they give the same graph with other numbers.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cmrc.errors import HostError
from cmrc.hosts.protocols import Described, Exports
from cmrc.ir.fingerprint import Fingerprint
from cmrc.program.lower import KEY, Lowered, lower, provenance_of
from cmrc.program.plan import Plan
from cmrc.program.program import Program, trace

SAME = "result"  # the link that is checked by lowering again
EXACT = "check"  # the link that is checked by comparing with the clamped model again
SAME_GRAPH = "graph"  # the same for a recovered model, whose weights were trained


@dataclass(frozen=True, slots=True)
class Link:
    """One part of a file's record: what is recorded, and what the given model and plan yield."""

    name: str
    recorded: str
    actual: str

    @property
    def holds(self) -> bool:
        return self.recorded == self.actual


def provenance_notes(small: Program) -> dict[str, str]:
    """What a model records about itself, if anything, without the prefix of the keys."""
    described = small.host.metadata if isinstance(small.host, Described) else {}
    return {name.removeprefix(KEY): text for name, text in described.items() if name.startswith(KEY)}


def read_provenance(small: Program) -> dict[str, str]:
    """What a lowered model records about itself. A model without a record is refused."""
    recorded = provenance_notes(small)
    if "source" not in recorded or "plan" not in recorded:
        raise HostError(
            "the model has no record of where it comes from",
            fix="only files that cmrc lowered have this record: see `Lowered.save`",
        )
    return recorded


def verify_provenance(small: Program, program: Program, plan: Plan) -> list[Link]:
    """Every link from the model and the plan to the lowered model; the last one is found by lowering again."""
    recorded = read_provenance(small)
    links = _compared(recorded, {k.removeprefix(KEY): v for k, v in provenance_of(program, plan).items()})
    if all(link.holds for link in links):
        lowered = lower(program, plan, residue="keep", growth="allow")
        recovered = "recovered" in recorded
        name, digest = (SAME_GRAPH, _graph_digest) if recovered else (SAME, _digest)
        links.append(_again(name, digest(small.fingerprint), lowered, digest))
        if recovered:
            return links
        if EXACT in recorded:
            links.append(Link(EXACT, _exact(_holds(recorded[EXACT])), _exact(lowered.check().holds)))
    return links


def _again(name: str, recorded: str, lowered: Lowered, digest: Callable[[Fingerprint], str]) -> Link:
    """The file made again: from the lowered torch model, or else in the original's export (`Program.exports_once`)."""
    link, before = Link(name, recorded, ""), lowered.program.exports_once
    for once in (False, True):
        lowered.program.exports_once = once
        with tempfile.TemporaryDirectory(prefix="cmrc-") as folder:
            lowered.save(Path(folder) / "again.onnx")
            link = Link(name, recorded, digest(trace(Path(folder) / "again.onnx").fingerprint))
        if link.holds or not isinstance(lowered.program.host, Exports):
            break
    lowered.program.exports_once = before
    return link


def _digest(model: Fingerprint) -> str:
    return model.digest


def _holds(text: str) -> bool:
    """What a recorded check says. Text that is not a check counts as one that failed."""
    try:
        return json.loads(text)["holds"] is True
    except (ValueError, TypeError, KeyError):
        return False


def _exact(holds: bool) -> str:
    return "exact" if holds else "not exact"


def _graph_digest(model: Fingerprint) -> str:
    """A digest of the wiring and of the types and shapes of the weights, but not of their numbers."""
    kinds = sorted((name, digest.split(":")[0]) for name, digest in model.weights.items())
    return hashlib.sha256(repr((model.structure, kinds)).encode()).hexdigest()[:16]


def _compared(recorded: Mapping[str, str], actual: Mapping[str, str]) -> list[Link]:
    """The version is not compared: another version may give the same model."""
    names = [name for name in {**actual, **recorded} if name in ("source", "plan", "recipe", "data")]
    return [Link(name, recorded.get(name, ""), actual.get(name, "")) for name in names]
