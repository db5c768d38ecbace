"""One of two processes that train a lowered module together: run by test_torch.py under torch.distributed.run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cmrc

STEPS = 3


def lowered_module() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    program = cmrc.trace(model, (torch.randn(6, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    return cmrc.lower(program, cmrc.Plan(program).do("1", units=range(8), constant=0.2)).module


def train(module: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for x, y in batches:
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = [
        (torch.randn(16, 8, generator=g), torch.randint(0, 4, (16,), generator=g))
        for g in [torch.Generator().manual_seed(1)]
        for _ in range(STEPS)
    ]
    module = lowered_module().train()
    train(DistributedDataParallel(module), [(x[rank::size], y[rank::size]) for x, y in whole])
    torch.save(module.state_dict(), folder / f"{rank}.pt")
    if rank == 0:
        alone = lowered_module().train()
        train(alone, whole)
        torch.save(alone.state_dict(), folder / "alone.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
