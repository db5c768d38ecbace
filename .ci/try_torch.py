"""A torch model with an installed wheel: trace, plan, lower, check, train, save. Run by .ci/wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import cmrc

assert "site-packages" in cmrc.__file__, cmrc.__file__
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).eval()
x = torch.randn(512, 8)
program = cmrc.trace(model, (x[:4],), dynamic_shapes=({0: torch.export.Dim("batch")},))
plan = cmrc.plan(program, data=[x], preset="joint", keep=0.5)
lowered = cmrc.lower(program, plan)
assert lowered.check((x,)).holds
lowered.save("small.onnx")
assert cmrc.trace("small.onnx").cost().parameters < program.cost().parameters
module = lowered.module.train()
torch.nn.functional.mse_loss(module(x), torch.zeros(512, 4)).backward()
assert all(parameter.grad is not None for parameter in module.parameters())
sys.stdout.write(f"{lowered!r}, {Path('small.onnx').stat().st_size} bytes\n")
