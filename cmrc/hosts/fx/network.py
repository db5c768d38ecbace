"""A torch graph that runs with autograd: all of its values seen, or its parameters trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from cmrc.hosts.fx.module import LoweredModule, run_flat
from cmrc.ir.graph import Array

VIEWS = (torch.ops.aten.view.default, torch.ops.aten.as_strided.default)


@dataclass(frozen=True, eq=False)
class FxNetwork:
    """A module in eval mode, which owns its tensors; `arguments` makes what its forward takes.

    Convolutions run with the channels last, which takes a processor about half the time, unless the graph relies on the layout.
    """

    module: LoweredModule
    arguments: Callable[[Mapping[str, Array]], Sequence[Any]]
    parameters: dict[str, torch.Tensor]

    @classmethod
    def train(
        cls,
        module: LoweredModule,
        names: Collection[str],
        arguments: Callable[[Mapping[str, Array]], Sequence[Any]],
    ) -> FxNetwork:
        """Only the parameters of these names get gradients."""
        tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(
            module.named_buffers(remove_duplicate=False)
        )
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        if _may_change_layout(module):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            arguments = _channels_last(arguments)
        return cls(module.eval(), arguments, {name: tensors[name].requires_grad_() for name in names})

    def run(
        self, inputs: Mapping[str, Array], taps: Collection[str] = ()
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        args = self.arguments(inputs)
        seen: dict[str, torch.Tensor] = {}
        result = run_flat(_Watched(self.module, taps, seen, False), args) if taps else self.module(*args)
        return _tensors(result), {name: seen[name] for name in taps}


def _may_change_layout(module: fx.GraphModule) -> bool:
    """Whether there are convolutions of pictures, and no view, which is refused in another layout."""
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return torch.ops.aten.conv2d.default in targets and not any(view in targets for view in VIEWS)


def _channels_last(arguments: Callable[[Mapping[str, Array]], Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    def laid_out(leaf: Any) -> Any:
        pictures = isinstance(leaf, torch.Tensor) and leaf.ndim == 4
        return leaf.contiguous(memory_format=torch.channels_last) if pictures else leaf

    return lambda inputs: pytree.tree_map(laid_out, list(arguments(inputs)))


def watch(
    module: fx.GraphModule, args: Sequence[Any], taps: Collection[str]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The outputs, and every floating value from the first tap on, with the taps to differentiate by."""
    seen: dict[str, torch.Tensor] = {}
    with torch.enable_grad(), _frozen(module):
        result = run_flat(_Watched(module, taps, seen, True), args)
    return _tensors(result), seen


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if torch.is_tensor(leaf)]


class _Watched(fx.Interpreter):
    """Keeps floating values: all of them and with gradients by the taps, or the taps alone."""

    def __init__(
        self, module: fx.GraphModule, taps: Collection[str], seen: dict[str, torch.Tensor], by_taps: bool
    ) -> None:
        super().__init__(module)
        self.taps, self.seen, self.by_taps = taps, seen, by_taps

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and result.is_floating_point() and n.op == "call_function":
            if self.by_taps and n.name in self.taps and not result.requires_grad:
                result = result.requires_grad_()
            if self.by_taps or n.name in self.taps:
                self.seen[n.name] = result
        return result


@contextmanager
def _frozen(module: torch.nn.Module) -> Iterator[None]:
    """Parameters need no gradient here: only what lies above the values is recorded."""
    before = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)
