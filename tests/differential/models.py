"""The cases of the differential suite: a model, example inputs, the sizes that may vary, and the do's that are asked of it.

`cases_*.py` register them; `CASES` holds all. Every weight, statistic and slope is random and none is a special number
(no unit batch-norm scale, no zero bias), so that a rule that forgets one of them shows.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

import cmrc

Dims = Mapping[int, str]  # the axes of an input whose size may vary, by the name of the size
SIZES = {
    "n": (3, 5),
    "t": (4, 7),
    "h": (8, 11),
    "w": (7, 10),
    "d": (5, 6),
}  # example size, and the second size it is tried at


@dataclass(frozen=True)
class Ask:
    """One do of a case. `onnx_site` where the exporter renames or fuses the module away."""

    site: str
    units: Sequence[int] | str
    constant: Any = None
    affine: cmrc.Affine | None = None
    axis: int | None = None
    onnx_site: str = ""
    left: int | None = None  # units that the site keeps, where it is not "those that were not replaced"


@dataclass(frozen=True)
class Input:
    """An input: sizes, of which letters are looked up in SIZES; token ids below `ids` instead of numbers where that is set."""

    shape: tuple[int | str, ...]
    ids: int = 0

    def dims(self, letters: str) -> Dims:
        return {i: n for i, n in enumerate(self.shape) if isinstance(n, str) and n in letters}

    def sample(self, seed: int, dtype: torch.dtype, varied: str = "") -> torch.Tensor:
        """`varied` are the letters that take their second size."""
        shape = [n if isinstance(n, int) else SIZES[n][n in varied] for n in self.shape]
        generator = torch.Generator().manual_seed(seed)
        if self.ids:
            return torch.randint(self.ids, shape, generator=generator)
        return (0.2 + torch.randn(shape, generator=generator)).to(dtype)


@dataclass(frozen=True)
class Case:
    """`dynamic` lists which letters vary in each variant: "" is the static one."""

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    asks: tuple[Ask, ...]
    dynamic: tuple[str, ...] = ("n",)
    dtype: torch.dtype = torch.float32
    hosts: tuple[str, ...] = ("fx", "onnx")
    stops: str = ""  # what the ResidueError says
    shrinks: bool = True  # whether there are fewer parameters afterwards
    save: bool = False  # whether the torch result is also written to ONNX and run there

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        module = randomise(self.make()).eval()
        return module if self.dtype == torch.float32 else module.to(self.dtype)

    def args(self, variant: str = "", *, seed: int = 1, varied: bool = False) -> tuple[torch.Tensor, ...]:
        return tuple(x.sample(seed + i, self.dtype, variant if varied else "") for i, x in enumerate(self.inputs))

    def dynamic_shapes(self, variant: str) -> tuple[Any, ...] | None:
        if not variant:
            return None
        return tuple(dict.fromkeys(x.dims(variant), torch.export.Dim.DYNAMIC) or None for x in self.inputs)


CASES: dict[str, Case] = {}


def case(
    name: str, make: Callable[[], nn.Module], shape: Sequence[int | str] | Sequence[Input], *asks: Ask, **options: Any
) -> None:
    """Register a case. `shape` is the shape of the one input, or a list of inputs. Variants default to the letters in it."""
    assert name not in CASES, name
    inputs = tuple(shape) if shape and isinstance(shape[0], Input) else (Input(tuple(shape)),)  # type: ignore[arg-type]
    letters = "".join(sorted({n for x in inputs for n in x.shape if isinstance(n, str)}))
    options.setdefault("dynamic", (letters,) if letters else ("",))
    CASES[name] = Case(name, make, inputs, asks, **options)


# ---------------------------------------------------------------- building models


def chain(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def net(forward: Callable[..., Any], **members: nn.Module | torch.Tensor) -> nn.Module:
    """A module with these members (tensors become parameters, masks buffers) and this forward: `lambda m, x: m.fc(x)`."""
    module: nn.Module = type("Net", (nn.Module,), {"forward": forward})()
    for name, member in members.items():
        if isinstance(member, torch.Tensor) and not member.is_floating_point():
            module.register_buffer(name, member)
        else:
            setattr(module, name, nn.Parameter(member) if isinstance(member, torch.Tensor) else member)
    return module


def step(function: Callable[..., Any]) -> nn.Module:
    """A function of values as a module, so that its result has a name in both hosts."""
    return net(lambda m, *args: function(*args))


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.InstanceNorm2d, nn.RMSNorm)


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and statistic a random value of a size that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    def uniform(tensor: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(tensor.shape, generator=generator)

    for owner in module.modules():
        if isinstance(owner, NORMS) and owner.eps is not None:
            owner.eps = 0.03  # the usual 1e-5 would be lost in the rounding of float32
        for name, parameter in owner.named_parameters(recurse=False):
            if isinstance(owner, nn.PReLU):
                parameter.copy_(uniform(parameter, 0.1, 0.4))
            elif isinstance(owner, NORMS) and name == "weight":
                parameter.copy_(uniform(parameter, 0.5, 1.5))
            elif type(owner).__name__ == "Net":  # numbers and vectors that the forward uses by hand
                parameter.copy_(uniform(parameter, 0.4, 1.3) * torch.sign(normal(parameter)))
            elif parameter.ndim >= 2 and not isinstance(owner, nn.Embedding):
                parameter.copy_(normal(parameter) / math.sqrt(max(1, parameter.numel() // parameter.shape[0])))
            else:
                parameter.copy_(0.5 * normal(parameter))
        for name, buffer in owner.named_buffers(recurse=False):
            if name == "running_mean":
                buffer.copy_(0.5 * normal(buffer))
            elif name == "running_var":
                buffer.copy_(uniform(buffer, 0.5, 2.0))
    return module


def constants(count: int) -> list[float]:
    """Constants that differ, of both signs, none zero."""
    return [(1.3 + 0.37 * i) * (-1) ** (i // 2) for i in range(count)]


def const(site: str, units: Sequence[int], constant: Any = None, **options: Any) -> Ask:
    return Ask(site, units, constants(len(units)) if constant is None else constant, **options)


def affine(site: str, units: Sequence[int], parents: Sequence[int], bias: Any = None, **options: Any) -> Ask:
    """units := weight · parents + bias, with dense numbers."""
    weight = [
        [0.9 - 0.35 * i + 0.6 * (-1) ** (i + j) + 0.1 * j for j in range(len(parents))] for i in range(len(units))
    ]
    relation = cmrc.Affine(parents, weight, constants(len(units)) if bias is None else bias)
    return Ask(site, units, affine=relation, **options)


@cache
def exported(name: str, variant: str) -> tuple[nn.Module, torch.export.ExportedProgram]:
    """The model of a case and its export, once a process."""
    named = CASES[name]
    module = named.module()
    return module, torch.export.export(module, named.args(variant), dynamic_shapes=named.dynamic_shapes(variant))


# torch.onnx.export reads its library of some 500 functions anew each time, which takes longer than the export itself.
ONNXRegistry.from_torchlib = staticmethod(cache(ONNXRegistry.from_torchlib))  # type: ignore[method-assign]


def to_onnx(program: torch.export.ExportedProgram) -> Any:
    """The program as torch's own exporter writes it, an onnx.ModelProto."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = torch.onnx.export(program, dynamo=True, verbose=False)
    assert saved is not None
    return saved.model_proto
