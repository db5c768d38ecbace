"""Several processes at one task: for `torchrun --nproc-per-node N -m cmrc calibrate ...`, and likewise `plan`, `verify` and `recover`.

Every process takes its own batches, and their statistics are put together by all-reduce. The merged mean is Σnᵢāᵢ/Σnᵢ; about it, each brings Mᵢ + nᵢ(āᵢ−ā)(āᵢ−ā)ᵀ; sums, minima
and maxima reduce as they are; sampled rows are gathered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from cmrc.ir.graph import Array
from cmrc.statistics.site_stats import EXTREMES, SAMPLED, SUMS, SiteStats
from cmrc.statistics.stats import Stats

Item = TypeVar("Item")


def shard() -> tuple[int, int]:
    """Which process this is, of how many: as torchrun says."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def group() -> Iterator[None]:
    """The processes that torchrun started as one group: nccl where every process has a GPU, else gloo."""
    if shard()[1] == 1:
        yield
        return
    import torch
    import torch.distributed as distributed
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    nccl = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if nccl:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, world = next(rendezvous("env://"))
    # After a restart, the store still has the addresses of the processes that were ended.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    distributed.init_process_group(
        "nccl" if nccl else "gloo",
        store=PrefixStore(f"cmrc/{attempt}", store),
        rank=rank,
        world_size=world,
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def all_merge(stats: Stats) -> Stats:
    """The statistics of all processes, the same in every one of them. A process alone keeps its own."""
    if shard()[1] == 1:
        return stats
    import torch.distributed as distributed

    parts: list[Any] = [None] * shard()[1]
    distributed.all_gather_object(parts, (stats.data, stats.samples, [s.how for s in stats.sites.values()]))
    data, samples = sum(t[0] for t in parts) % 2**256, sum(t[1] for t in parts)
    sites = {name: all_merge_site(site) for name, site in stats.sites.items()}
    for i, site in enumerate(sites.values()):
        site.how = next((t[2][i] for t in parts if t[2][i]), "")
    return replace(stats, sites=sites, data=data, samples=samples)


def from_first(make: Callable[[], Item]) -> Item:
    """What the first process makes of it, in every process; also its error."""
    if shard()[1] == 1:
        return make()
    import torch.distributed as distributed

    shared: list[Any] = [None, None]
    if not shard()[0]:
        try:
            shared[0] = make()
        except Exception as error:  # or the others would wait for ever
            shared[1] = error
    distributed.broadcast_object_list(shared)
    if shared[1] is not None:
        raise shared[1]
    return shared[0]  # type: ignore[no-any-return]


def from_each(mine: Item) -> list[Item]:
    """What every process has, in every process."""
    if shard()[1] == 1:
        return [mine]
    import torch.distributed as distributed

    shared: list[Any] = [None] * shard()[1]
    distributed.all_gather_object(shared, mine)
    return shared


def total(array: Array) -> Array:
    """The sum of all processes' arrays, in its own type, the same in every one of them."""
    import torch
    import torch.distributed as distributed

    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(array, device=device)
    distributed.all_reduce(tensor)
    return np.asarray(tensor.cpu().numpy())


def all_merge_site(mine: SiteStats) -> SiteStats:
    """The statistics that all processes have of a site, the same in every one of them."""
    if shard()[1] == 1:
        return mine
    import torch.distributed as distributed

    operation = distributed.ReduceOp
    names: list[Any] = [None] * shard()[1]
    distributed.all_gather_object(names, {key: array.shape for key, array in mine.arrays.items()})
    shapes = max(names, key=len)  # a process without a batch has no arrays
    if not shapes:
        return mine

    def own(name: str, absent: float = 0.0) -> Array:
        return mine.arrays[name] if name in mine.arrays else np.full(shapes[name], absent)

    count, samples = _reduce(np.array([mine.count, mine.samples]), operation.SUM)
    mean = _reduce(mine.count * own("mean"), operation.SUM) / count
    apart = own("mean") - mean if mine.count else np.zeros_like(mean)
    merged = {"mean": mean, "squares": _reduce(own("squares") + mine.count * apart**2, operation.SUM)}
    if "scatter" in shapes:
        merged["scatter"] = _reduce(own("scatter") + mine.count * np.outer(apart, apart), operation.SUM)
    for other, cross in (("origin", "cross"), ("lost", "lost_cross")):
        if cross in shapes:
            merged[other] = _reduce(mine.count * own(other), operation.SUM) / count
            moved = own(other) - merged[other] if mine.count else np.zeros_like(merged[other])
            merged[cross] = _reduce(own(cross) + mine.count * np.outer(apart, moved), operation.SUM)
    merged |= {name: _reduce(own(name), operation.SUM) for name in SUMS if name in shapes}
    for name in EXTREMES:
        if name in shapes:
            sign = 1.0 if name == "high" else -1.0
            merged[name] = sign * _reduce(sign * own(name, -sign * np.inf), operation.MAX)
    whole = SiteStats(mine.columns, mine.needs, float(count), float(samples), merged, mine.how)
    if "rows" in shapes:
        parts: list[Any] = [None] * shard()[1]
        sampled = {key: mine.arrays[key] for key in SAMPLED if key in mine.arrays}
        distributed.all_gather_object(parts, sampled)
        whole.keep_rows([part for part in parts if part])
    return whole


def _reduce(array: Array, operation: Any) -> Array:
    import torch
    import torch.distributed as distributed

    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(array, dtype=torch.float64, device=device)
    distributed.all_reduce(tensor, operation)
    return np.asarray(tensor.cpu().numpy())
