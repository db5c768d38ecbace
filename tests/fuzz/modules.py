"""Random torch modules: steps that are called one after the other, some modules twice, some weights tied, some in place.

A module is a list of plain steps, so that a failure can be made small and kept:

    {"module": "Linear", "args": [4, 5], "in": [0]}      a module of torch.nn, on the value of that number
    {"again": 1, "in": [3]}                              the module of an earlier step once more
    {"tied": 1, "in": [2]}                               a linear map by the transposed weight of an earlier one
    {"call": "cat", "in": [1, 2], "args": [-1]}          a function of the table below
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.fuzz.builder import Unfit

Step = dict[str, Any]
LARGEST, STEEPEST = 2000, 60.0

CALLS: dict[str, Callable[..., Any]] = {
    "relu": torch.relu, "relu_": lambda x: torch.relu_(x), "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "silu": functional.silu, "gelu": functional.gelu, "hardswish": functional.hardswish, "abs": torch.abs, "neg": torch.neg,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum,
    "add_": lambda x, y: x.add_(y), "mul_": lambda x, y: x.mul_(y), "add_number": lambda x, n: x + n,
    "mul_number": lambda x, n: x * n, "mul_number_": lambda x, n: x.mul_(n), "clamp": lambda x: x.clamp(-0.5, 0.9),
    "cat": lambda *xs: torch.cat(xs[:-1], xs[-1]), "chunk": lambda x, axis: torch.chunk(x, 2, axis)[0],
    "glu": lambda x, axis: functional.glu(x, axis), "narrow": lambda x, axis, start, size: x.narrow(axis, start, size),
    "transpose": lambda x, a, b: x.transpose(a, b), "permute": lambda x, *axes: x.permute(*axes),
    "reshape": lambda x, *shape: x.reshape(*shape), "view": lambda x, *shape: x.view(*shape),
    "flatten": lambda x, start: x.flatten(start), "unsqueeze": lambda x, axis: x.unsqueeze(axis),
    "squeeze": lambda x, *axes: x.squeeze(*axes),
    "mean": lambda x, axis, keep: x.mean(axis, keepdim=keep), "sum": lambda x, axis, keep: x.sum(axis, keepdim=keep),
    "amax": lambda x, axis, keep: x.amax(axis, keepdim=keep), "softmax": lambda x, axis: torch.softmax(x, axis),
    "expand": lambda x, *shape: x.expand(*shape), "select": lambda x, axis, at: x.select(axis, at),
    "max_pool": lambda x, k: functional.max_pool2d(x, k, padding=k // 2),
    "avg_pool": lambda x, k, count: functional.avg_pool2d(x, k, padding=k // 2, count_include_pad=count),
    "interpolate": lambda x: functional.interpolate(x, scale_factor=2), "pad": lambda x, n: functional.pad(x, (n, n)),
    "matmul": torch.matmul, "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "attention": functional.scaled_dot_product_attention, "where": lambda x, y: torch.where(x > 0, x, y),
}  # fmt: skip


class Stepwise(nn.Module):
    """The module of a list of steps. Values that nobody reads are its outputs."""

    def __init__(self, steps: Sequence[Step], inputs: int, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.steps, self.inputs = list(steps), inputs
        generator = torch.Generator().manual_seed(seed)
        for number, step in enumerate(steps):
            if "module" not in step:
                continue
            module = getattr(nn, step["module"])(*step["args"], **step.get("named", {})).to(dtype)
            for name, tensor in module.state_dict().items():
                if tensor.dtype == dtype:
                    drawn = torch.randn(tensor.shape, generator=generator, dtype=dtype) * 0.6
                    tensor.copy_(drawn.abs() + 0.3 if name == "running_var" else drawn)
            self.add_module(f"step{number}", module)
        read = {i for step in steps for i in step["in"]}
        self.outputs = [inputs + i for i in range(len(steps)) if inputs + i not in read]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(inputs)
        for number in range(len(self.steps)):
            values.append(self.run_step(number, values))
        return tuple(values[i] for i in self.outputs)

    def run_step(self, number: int, values: Sequence[torch.Tensor]) -> torch.Tensor:
        step = self.steps[number]
        operands = [values[i] for i in step["in"]]
        if "module" in step:
            return getattr(self, f"step{number}")(*operands)  # type: ignore[no-any-return]
        if "again" in step:
            return getattr(self, f"step{step['again']}")(*operands)  # type: ignore[no-any-return]
        if "tied" in step:
            return functional.linear(operands[0], getattr(self, f"step{step['tied']}").weight.t())
        return CALLS[step["call"]](*operands, *step.get("args", ()))  # type: ignore[no-any-return]


def generate(rng: np.random.Generator) -> tuple[list[Step], list[tuple[int, ...]]]:
    """Steps and the shapes of the inputs."""
    rank = int(rng.choice([2, 3, 4], p=[0.4, 0.25, 0.35]))
    shape = tuple(int(n) for n in rng.integers(1, 6, size=rank))
    shapes = [shape] if rng.random() < 0.75 else [shape, shape]
    steps: list[Step] = []
    values = [torch.from_numpy(rng.normal(size=s)) for s in shapes]
    _grow(rng, steps, values, _affine)
    for _ in range(int(rng.integers(1, 7))):
        _grow(rng, steps, values, _affine if rng.random() < 0.25 else _other)
    read = {i for step in steps for i in step["in"]}
    for leaf in range(len(shapes), len(values)):
        if leaf not in read and rng.random() < 0.9:
            _grow(rng, steps, values, _affine, leaf)
    if not steps:
        raise Unfit("no step")
    return steps, shapes


def _grow(
    rng: np.random.Generator, steps: list[Step], values: list[torch.Tensor], maker: Any, at: int | None = None
) -> None:
    for _ in range(6):
        latest = at if at is not None else len(values) - 1 if rng.random() < 0.75 else int(rng.integers(len(values)))
        step = maker(rng, steps, values, latest) if values[latest].ndim else None
        if step is None:
            continue
        try:
            with torch.no_grad():
                copies = [value.clone() for value in values]
                network = Stepwise([*steps, step], len(values) - len(steps), 0, torch.float64).eval()
                result = network.run_step(len(steps), copies)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            continue
        if (
            not result.numel()
            or result.numel() > LARGEST
            or not torch.isfinite(result).all()
            or result.abs().max() > STEEPEST
        ):
            continue
        steps.append(step)
        values[:] = [*copies, result]
        return


def _affine(rng: np.random.Generator, steps: list[Step], values: list[torch.Tensor], at: int) -> Step | None:
    x = values[at]
    width = int(rng.integers(1, 8))
    before = [i for i, s in enumerate(steps) if s.get("module") in ("Linear", "Conv2d", "Conv1d")]
    if before and rng.random() < 0.15:
        return {"again": int(rng.choice(before)), "in": [at]}
    linear = [i for i in before if steps[i]["module"] == "Linear"]
    if linear and rng.random() < 0.12:
        return {"tied": int(rng.choice(linear)), "in": [at]}
    if x.ndim == 4 and rng.random() < 0.8:
        groups = int(rng.choice([1, 1, x.shape[1]]))
        kernel = int(rng.choice([1, 3]))
        named = {"padding": int(rng.integers(0, 2)), "groups": groups, "bias": bool(rng.random() < 0.7)}
        return {
            "module": "Conv2d",
            "args": [x.shape[1], groups * int(rng.integers(1, 4)), kernel],
            "named": named,
            "in": [at],
        }
    if x.ndim == 3 and rng.random() < 0.3:
        return {"module": "Conv1d", "args": [x.shape[1], width, 1], "in": [at]}
    return {"module": "Linear", "args": [x.shape[-1], width, bool(rng.random() < 0.7)], "in": [at]}


def _other(rng: np.random.Generator, steps: list[Step], values: list[torch.Tensor], at: int) -> Step | None:
    x, rank = values[at], values[at].ndim
    axis = int(rng.integers(-rank, rank))
    kind = rng.random()
    if kind < 0.35:
        name = str(rng.choice(["relu", "relu_", "tanh", "sigmoid", "silu", "gelu", "hardswish", "abs", "neg", "clamp"]))
        return {"call": name, "in": [at]}
    if kind < 0.45:
        name = str(rng.choice(["add_number", "mul_number", "mul_number_"]))
        return {"call": name, "in": [at], "args": [float(np.round(rng.normal(), 2))]}
    alike = [i for i, value in enumerate(values) if value.shape == x.shape]
    if kind < 0.6:
        name = str(rng.choice(["add", "add", "mul", "sub", "maximum", "add_", "mul_", "where"]))
        return {"call": name, "in": [at, int(rng.choice(alike))]}
    if kind < 0.65:
        return {"call": "cat", "in": [at, int(rng.choice(alike))], "args": [axis]}
    if kind < 0.72:
        name = str(
            rng.choice(["BatchNorm2d" if rank == 4 else "BatchNorm1d", "LayerNorm", "GroupNorm", "Dropout", "ReLU"])
        )
        if rank < 2:
            return None
        args: list[Any] = {
            "LayerNorm": [x.shape[-1]], "GroupNorm": [1, x.shape[1]], "Dropout": [0.5], "ReLU": [bool(rng.random() < 0.5)]
        }.get(name, [x.shape[1]])  # fmt: skip
        return {"module": name, "args": args, "in": [at]}
    if kind < 0.92:
        name = str(rng.choice([
            "chunk", "glu", "narrow", "transpose", "permute", "reshape", "view", "flatten", "unsqueeze", "squeeze", "mean", "sum",
            "amax", "softmax", "select",
        ]))  # fmt: skip
        return {"call": name, "in": [at], "args": _arguments(rng, name, x, axis)}
    if rank == 4 and kind < 0.97:
        name = str(rng.choice(["max_pool", "avg_pool", "interpolate", "pad"]))
        given = {"max_pool": [3], "avg_pool": [3, bool(rng.random() < 0.5)], "pad": [1]}.get(name, [])
        return {"call": name, "in": [at], "args": given}
    if rank >= 3:
        return {"call": "attention", "in": [at, at, at]}
    return {"call": "layer_norm", "in": [at]}


def _arguments(rng: np.random.Generator, name: str, x: torch.Tensor, axis: int) -> list[Any]:
    shape = list(x.shape)
    if name == "narrow":
        start = int(rng.integers(0, shape[axis]))
        return [axis, start, int(rng.integers(1, shape[axis] - start + 1))]
    if name == "transpose":
        return [axis, int(rng.integers(0, x.ndim))]
    if name == "permute":
        return [int(i) for i in rng.permutation(x.ndim)]
    if name in ("reshape", "view"):
        place = axis % x.ndim
        if rng.random() < 0.5 and place + 1 < x.ndim:
            shape[place : place + 2] = [shape[place] * shape[place + 1]]
        else:
            factors = [n for n in range(1, shape[place] + 1) if shape[place] % n == 0]
            factor = int(rng.choice(factors))
            shape[place : place + 1] = [factor, shape[place] // factor]
        if rng.random() < 0.5:
            shape[int(rng.integers(len(shape)))] = -1
        return [int(n) for n in shape]
    if name == "squeeze":
        return [] if rng.random() < 0.5 else [axis]
    if name == "flatten":
        return [int(rng.integers(0, x.ndim))]
    if name in ("mean", "sum", "amax"):
        return [axis, bool(rng.random() < 0.6)]
    if name == "select":
        return [axis, int(rng.integers(0, shape[axis]))]
    return [axis]
