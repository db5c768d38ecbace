"""The torch result: a plain `fx.GraphModule` whose `.train()` and `.eval()` work, and which can be pickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.graph import CodeGen, _PyTreeCodeGen, _PyTreeInfo

from cmrc.hosts.fx_ops import TRAINING_FLAGS, opname


class LoweredModule(fx.GraphModule):
    """A graph under the user's own parameter names.

    `.train()` and `.eval()` rewrite the flags of dropout and batch norm that `torch.export` bakes into the graph, except
    those that are given by keyword: they are the same in both (`fx_clean.py`).
    """

    @classmethod
    def assemble(cls, attributes: Mapping[str, Any], graph: fx.Graph, unread: Mapping[str, torch.Tensor]) -> Self:
        """`unread` holds state that the graph does not read (a batch norm's counter) and a state dict still has."""
        module = cls(dict(attributes), graph)
        for name, tensor in unread.items():
            *path, last = name.split(".")
            owner: torch.nn.Module = module
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            if isinstance(tensor, torch.nn.Parameter):
                continue
            owner.register_buffer(last, tensor)
        return module

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        changed = False
        for node in self.graph.nodes:
            flag = TRAINING_FLAGS.get(opname(node))
            if flag is not None and len(node.args) > flag and node.args[flag] != mode:
                node.update_arg(flag, mode)
                changed = True
        if changed:
            self.recompile()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        function, args = super().__reduce__()
        return _revive, (function, args)


def _revive(function: Callable[..., fx.GraphModule], args: tuple[Any, ...]) -> LoweredModule:
    plain = function(*args)
    module = LoweredModule(plain, plain.graph)
    for name, buffer in plain.named_buffers():
        owner, _, last = name.rpartition(".")
        target = module.get_submodule(owner) if _has(module, owner) else None
        if target is not None and last not in target._buffers:
            target.register_buffer(last, buffer)
    module.training = plain.training
    return module


def _has(module: torch.nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def flat_codegen(exported: ExportedProgram) -> CodeGen:
    """Code that takes and returns what the user's own module does."""
    spec, out_spec = exported.call_spec.in_spec, exported.call_spec.out_spec
    positional, by_keyword = argument_names(exported)
    return _PyTreeCodeGen(_PyTreeInfo([*positional, *by_keyword], spec, out_spec))


def argument_names(exported: ExportedProgram) -> tuple[list[str], list[str]]:
    """The arguments of the user's forward that the export was given by position, and those by keyword."""
    spec = exported.call_spec.in_spec
    count, by_keyword = spec.child(0).num_children, list(spec.child(1).context or [])
    signature = exported.module_call_graph[0].signature if exported.module_call_graph else None
    told = list(signature.forward_arg_names or []) if signature is not None else []
    names = told[:count] if told[count:] == by_keyword and all(name.isidentifier() for name in told) else []
    return names if len(names) == count else [f"arg_{i}" for i in range(count)], by_keyword
