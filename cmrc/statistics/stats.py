"""What `cmrc.calibrate` returns: the statistics of every site, and the model, data and options that they belong to."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from cmrc.errors import StatsError
from cmrc.ir.fingerprint import Fingerprint
from cmrc.ir.graph import Array
from cmrc.statistics import stats_file
from cmrc.statistics.columns import Columns
from cmrc.statistics.site_stats import SiteStats


@dataclass(slots=True, eq=False)
class Stats:
    """The statistics of every site, by the name of its value."""

    sites: dict[str, SiteStats]
    fingerprint: Fingerprint | None = None
    data: int = 0  # the sum of the hashes of all batches
    samples: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> SiteStats:
        for site in self.sites.values():
            if name in (site.columns.name, site.columns.value):
                return site
        known = ", ".join(site.columns.name for site in self.sites.values())
        raise StatsError(
            f"no statistics for site {name!r} (there are some for: {known})",
            fix=f"calibrate {name!r} as well, or plan with sites that have statistics",
        )

    def __repr__(self) -> str:
        return f"Stats({len(self.sites)} sites, {self.samples} samples)"

    @property
    def digest(self) -> str:
        """A name for the data, whatever the order of its batches."""
        return f"{self.data:064x}"[:16]

    def see(self, batch: bytes) -> None:
        """Add the digest of a batch to that of the data."""
        self.data = (self.data + int.from_bytes(batch, "big")) % 2**256

    def merge(self, other: Stats) -> Stats:
        """The statistics of two shards of the data."""
        if self.fingerprint != other.fingerprint or list(self.sites) != list(other.sites):
            raise StatsError(
                "the two parts belong to different models or sites", fix="calibrate every shard with the same arguments"
            )
        sites = {name: site.merge(other.sites[name]) for name, site in self.sites.items()}
        data = (self.data + other.data) % 2**256
        return Stats(sites, self.fingerprint, data, self.samples + other.samples, self.options)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, completely or not at all."""
        stats_file.write(Path(path), self.header(), self.arrays())

    @classmethod
    def load(cls, path: str | Path, *, mapped: bool = False) -> Self:
        """Read a file that `save` wrote. Anything wrong with it is a StatsError that says what.

        With `mapped` the numbers stay in the file until they are needed, for statistics that do not fit into memory.
        """
        header, arrays = stats_file.read(Path(path), mapped=mapped)
        if header.progress is not None:
            raise StatsError(
                "is a checkpoint of a calibration that did not finish", at=str(path), fix="resume it: checkpoint=path"
            )
        return cls.from_parts(header, arrays)

    def header(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON."""
        sites = {
            name: {
                "columns": dataclasses.asdict(site.columns),
                "needs": sorted(site.needs),
                "count": site.count,
                "samples": site.samples,
                "how": site.how,
            }
            for name, site in self.sites.items()
        }
        model = self.fingerprint.to_json() if self.fingerprint else None
        return {
            "sites": sites,
            "model": model,
            "data": hex(self.data),
            "samples": self.samples,
            "options": self.options,
        }

    def arrays(self) -> dict[str, Array]:
        """The arrays of all sites, by the number of the site and their name."""
        return {
            f"{i}.{name}": array for i, site in enumerate(self.sites.values()) for name, array in site.arrays.items()
        }

    @classmethod
    def from_parts(cls, header: stats_file.Header, arrays: Iterable[dict[str, Array]]) -> Self:
        """From what a checked file holds."""
        sites = {}
        for (name, entry), own in zip(header.sites.items(), arrays, strict=True):
            columns = Columns(**entry.columns.model_dump())
            sites[name] = SiteStats(columns, frozenset(entry.needs), entry.count, entry.samples, own, entry.how)
        model = None if header.model is None else Fingerprint.from_json(header.model.model_dump())
        return cls(sites, model, int(header.data, 16), header.samples, header.options)


def digest_of_batch(arrays: Iterable[Array]) -> bytes:
    """Of the dtypes, shapes and bytes of some arrays."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data if array.size else b"")
    return digest.digest()
