"""Two reductions side by side: their cost, the quality of their answers, and the widths of their layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cmrc.errors import FileError
from cmrc.reduction.account import Account
from cmrc.reduction.workfolder import ACCOUNT


def read_account(path: Path) -> Account:
    """The account of a reduction: its work folder, its report as JSON, or the model that `cmrc reduce` wrote."""
    if not path.exists():
        raise FileError(
            f"there is no {path}", fix="name the work folder that `cmrc reduce` made, or its report (.json)"
        )
    if path.suffix == ".onnx":
        path = path.with_suffix(".work")
    file = path / ACCOUNT if path.is_dir() else path
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileError(f"{path} holds no finished reduction", fix="run `cmrc reduce` to its end") from error
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {file}: {error}", fix="run `cmrc reduce` again") from error
    if not isinstance(document, dict) or not {"frontier", "chosen", "graph", "table"} <= set(document):
        raise FileError(f"{file} is not the record of a reduction", fix="name the work folder that `cmrc reduce` made")
    return document


@dataclass(eq=False)
class SideBySide:
    """The accounts of two reductions, and what they are called."""

    first: Account
    second: Account
    names: tuple[str, str]

    @property
    def both(self) -> tuple[Account, Account]:
        return self.first, self.second

    @cached_property
    def chosen(self) -> tuple[dict[str, Any], dict[str, Any]]:
        one, two = (next(s for s in a["frontier"] if s["share"] == a["chosen"]) for a in self.both)
        return one, two

    @property
    def is_same_model(self) -> bool:
        return bool(self.first["model"] == self.second["model"])

    @property
    def badge(self) -> str:
        return "of the same model" if self.is_same_model else "of different models"

    @cached_property
    def table(self) -> list[tuple[str, ...]]:
        """One row per measure."""

        def parts(name: str) -> list[str]:
            return [
                f"{size[name]:,} ({size[name] / max(a['original'][name], 1):.3f})"
                for a, size in zip(self.both, self.chosen, strict=True)
            ]  # fmt: skip

        rows = [("", *self.names), ("verdict", *("ready" if a["ready"] else "not ready" for a in self.both))]
        rows += [("chosen size", *(f"{a['chosen']:g} of the {a['of']}" for a in self.both))]
        rows += [
            (word, *parts(name))
            for word, name in (("parameters", "parameters"), ("multiply-adds", "macs"), ("bytes", "bytes"))
        ]
        speeds = [size["speed"] for size in self.chosen]
        if all(speeds):
            rows.append(("ms per run", *(f"{speed['milliseconds'][0]:.3g}" for speed in speeds)))
            rows.append(("speed-up over its original", *(_interval(speed["speedup"], 2) for speed in speeds)))
        qualities = [size["quality"] for size in self.chosen]
        rows.append(("agreement with its original", *(_interval(q["agreement"], 4) for q in qualities)))
        rows.append(("certified", *(f"{q['bound']:.4f}" for q in qualities)))
        for word, name in (("accuracy", "accuracy"), ("metric", "metric")):
            if all(q[name] for q in qualities):
                rows.append((word, *(f"{q[name][1]:.4f}" for q in qualities)))
        if all(q["kl"] is not None for q in qualities):
            rows.append(("KL", *(f"{q['kl']:.3g}" for q in qualities)))
        rows.append(("held-out samples", *(str(a["data"]["held_out"]) for a in self.both)))
        return rows

    @cached_property
    def widths(self) -> dict[str, tuple[int | None, int | None]]:
        """By layer the units that each keeps; a layer that one of them has not is left out there."""
        sites = dict.fromkeys([*self.first["widths"], *self.second["widths"]])
        return {site: (self._kept(self.first, site), self._kept(self.second, site)) for site in sites}

    @staticmethod
    def _kept(a: Account, site: str) -> int | None:
        width = a["widths"].get(site)
        return None if width is None else int(width[1])

    @property
    def width_table(self) -> list[tuple[str, ...]]:
        rows = [(site, *("" if kept is None else str(kept) for kept in pair)) for site, pair in self.widths.items()]
        return [("layer", *self.names), *rows]

    @property
    def words(self) -> str:
        return f"{self.names[0]}: {self.first['words']} {self.names[1]}: {self.second['words']}"

    @cached_property
    def verdict(self) -> str:
        """Which is smaller and which agrees more often; only of one model, on the same held-out samples."""
        if not self.is_same_model:
            return "the two are reductions of different models: their numbers are not comparable"
        one, two = self.chosen
        smaller = _which(two["macs"] - one["macs"], self.names, "needs fewer multiply-adds")
        if self.first["data"]["judged"] != self.second["data"]["judged"]:
            return f"{smaller}; they were judged on different samples, so agreement is not compared"
        difference = one["quality"]["agreement"][0] - two["quality"]["agreement"][0]
        return f"{smaller}; {_which(difference, self.names, 'agrees with the original more often')}"

    def to_json(self) -> dict[str, Any]:
        return {
            "names": list(self.names), "same_model": self.is_same_model, "verdict": self.verdict,
            "chosen": list(self.chosen), "widths": self.widths,
        }  # fmt: skip


def _which(difference: float, names: tuple[str, str], what: str) -> str:
    """The one of two that `difference` favours."""
    return f"neither {what}" if not difference else f"{names[0 if difference > 0 else 1]} {what}"


def _interval(values: list[float], digits: int) -> str:
    value, low, high = values[:3]
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
