"""The torch result: a plain `fx.GraphModule` with working `.train()` and `.eval()`, which can be pickled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.graph import CodeGen, _PyTreeCodeGen, _PyTreeInfo

from cmrc.errors import HostError
from cmrc.hosts.fx.clean import copy_graph
from cmrc.hosts.fx.lifted import LiftedProgram
from cmrc.hosts.fx.ops.pointwise import TRAINING_FLAGS
from cmrc.hosts.fx.schema import opname, positions

Kind: TypeAlias = tuple[torch.dtype, torch.Size]
EXPORT = "keep the shapes and types of parameters, or export lowered.module with torch.onnx.export"


class LoweredModule(fx.GraphModule):
    """A graph under the user's own parameter names.

    `.train()` and `.eval()` rewrite the flags of dropout and batch norm that `torch.export` bakes into the graph, except
    those that are given by keyword: they are the same in both (`clean.py`).

    Modules that differ only in parameters share their graph and its code, until one of them is asked for its graph.
    """

    _shares_graph = False

    @classmethod
    def template(cls, graph: fx.Graph, subgraphs: Mapping[str, Any]) -> Self:
        """The graph and its code, without the parameters that it reads."""
        empty = fx.Graph()
        for name in subgraphs:
            empty.get_attr(name)
        module = cls(dict(subgraphs), empty)
        module.graph = graph  # torch would look for the parameters, and make modules to hold them
        return module

    @classmethod
    def assemble(cls, template: fx.GraphModule, tensors: Mapping[str, torch.Tensor]) -> LoweredModule:
        """A module that runs the template's code with these very tensors."""
        # each module has its own class, which holds the code
        kind = type("GraphModuleImpl", (cls,), {"forward": type(template).forward})
        kind.__name__ = type(template).__name__
        module: LoweredModule = object.__new__(kind)
        torch.nn.Module.__init__(module)
        extra = {name: value for name, value in vars(template).items() if name not in vars(module)}
        vars(module).update({n: copy.copy(v) if isinstance(v, (list, dict)) else v for n, v in extra.items()})
        module._modules.update(template._modules)
        module._shares_graph, module.training = True, False
        owners: dict[str, torch.nn.Module] = {"": module}
        for name, tensor in tensors.items():
            path, _, last = name.rpartition(".")
            owner = owners.get(path) or _owner(owners, path)
            if isinstance(tensor, torch.nn.Parameter):
                owner.register_parameter(last, tensor)
            else:
                owner.register_buffer(last, tensor)
        return module

    @property
    def graph(self) -> fx.Graph:
        """The graph; from now on this module has its own copy."""
        if self._shares_graph:
            self._shares_graph = False
            self._graph = copy_graph(self._graph)
            self._graph.owning_module = self
        return self._graph

    @graph.setter
    def graph(self, g: fx.Graph) -> None:
        self._shares_graph = False
        fx.GraphModule.graph.fset(self, g)  # type: ignore[attr-defined]

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if any(_is_other_mode(node, mode) for node in self._graph.nodes):
            for node in self.graph.nodes:
                if _is_other_mode(node, mode):
                    node.update_arg(positions(node.target)[TRAINING_FLAGS[opname(node)]], mode)
            self.recompile()
        return self

    def tensors(self, kinds: Mapping[str, Kind]) -> dict[str, torch.Tensor]:
        """The present parameters and buffers of these names; an error if the shape or type of one has changed."""
        present: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in kinds.items():
            path, _, last = name.rpartition(".")
            owner = self.get_submodule(path) if _has(self, path) else None
            new = None if owner is None else owner._parameters.get(last, owner._buffers.get(last))
            if new is None:
                raise HostError(f"lowered.module has no {name!r} any more", fix=EXPORT)
            if kind_of(new) != (dtype, shape):
                now, was = _text(kind_of(new)), _text((dtype, shape))
                raise HostError(f"{name} of lowered.module is {now} now, and was lowered as {was}", fix=EXPORT)
            present[name] = new
        return present

    def __reduce__(self) -> tuple[Any, ...]:
        function, args = super().__reduce__()
        return _revive, (function, args)


def kind_of(tensor: torch.Tensor) -> Kind:
    return tensor.dtype, tensor.shape


def _text(kind: Kind) -> str:
    return f"{str(kind[0]).removeprefix('torch.')}{list(kind[1])}"


def _owner(owners: dict[str, torch.nn.Module], path: str) -> torch.nn.Module:
    """The module of this path, created if necessary."""
    parent, _, last = path.rpartition(".")
    outer = owners.get(parent) or _owner(owners, parent)
    owners[path] = torch.nn.Module()
    owners[path].training = outer.training
    outer._modules[last] = owners[path]
    return owners[path]


def _is_other_mode(node: fx.Node, mode: bool) -> bool:
    """Whether the training flag of the node differs from this mode."""
    flag = TRAINING_FLAGS.get(opname(node))
    if flag is None:
        return False
    place = positions(node.target)[flag]
    return len(node.args) > place and bool(node.args[place]) != mode


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


def run_flat(interpreter: fx.Interpreter, args: Sequence[Any]) -> Any:
    """Run an interpreter of a module on the arguments of the user's own forward, with the result of that."""
    graph: Any = interpreter.graph
    codegen = graph._codegen  # torch has no public way to its handling of nested arguments
    result = interpreter.run(*codegen.process_inputs(*args), enable_io_processing=False)
    return codegen.process_outputs(result)


def make_template(program: LiftedProgram) -> fx.GraphModule:
    """The graph with its parameters read as attributes instead of inputs, and the code for it."""
    graph = copy_graph(program.graph, program.tensor_names())
    graph._tracer_cls = None  # torch's own for exports cannot be pickled
    graph.set_codegen(flat_codegen(program.exported))
    names = [node.target for node in program.graph.nodes if node.op == "get_attr"]
    return LoweredModule.template(graph, {str(name): program.subgraph(str(name)) for name in names})


def flat_codegen(exported: ExportedProgram) -> CodeGen:
    """Code that takes and returns what the user's own module does."""
    spec, out_spec = exported.call_spec.in_spec, exported.call_spec.out_spec
    assert spec is not None
    positional, by_keyword = argument_names(exported)
    return _PyTreeCodeGen(_PyTreeInfo([*positional, *by_keyword], spec, out_spec))


def argument_names(exported: ExportedProgram) -> tuple[list[str], list[str]]:
    """The arguments of the user's forward that the export was given by position, and those by keyword."""
    spec = exported.call_spec.in_spec
    assert spec is not None
    count, by_keyword = spec.child(0).num_children, list(spec.child(1).context or [])
    signature = exported.module_call_graph[0].signature if exported.module_call_graph else None
    known = list(signature.forward_arg_names or []) if signature is not None else []
    names = known[:count] if known[count:] == by_keyword and all(name.isidentifier() for name in known) else []
    return names if len(names) == count else [f"arg_{i}" for i in range(count)], by_keyword
