"""A torch program as `torch.export` keeps it: parameters and buffers are inputs of the graph ("lifted").

lift          ExportedProgram -> a cleaned copy of its graph (no guards, no in-place ops), with the tensors behind its inputs
refreshed     the same after a patch, with the shapes in the nodes' meta brought up to date
to_exported   back to an ExportedProgram, without tracing again
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from cmrc.errors import TraceError
from cmrc.hosts.fx.clean import clean, copy_graph, without_dropout
from cmrc.hosts.fx.memory import own_all

TENSORS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True, slots=True, eq=False)
class LiftedProgram:
    """A lifted graph, the specs of its inputs, and their tensors. `exported` is the program from which it was lifted."""

    exported: ExportedProgram
    graph: fx.Graph
    specs: tuple[InputSpec, ...]
    state: Mapping[str, torch.Tensor]

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in self.state.values()), torch.device("cpu"))

    def tensor_names(self) -> dict[str, str]:
        """The inputs of the graph that are parameters and buffers, with their names."""
        return {s.arg.name: s.target for s in self.specs if s.kind in TENSORS and s.target is not None}

    def subgraph(self, path: str) -> Any:
        """The graph that a higher-order op runs."""
        return operator.attrgetter(path)(self.exported.graph_module)


def lift(
    exported: ExportedProgram, *, in_eval_mode: bool, owned: bool = False, functional: bool = False
) -> LiftedProgram:
    """The program with tensors of its own: later writes to the user's tensors do not affect it.

    With `owned`, nobody else has the tensors of the program, and they are not copied. A graph that writes into parts of
    tensors is made functional by torch first; `functional` says that it was.
    """
    signature = exported.graph_signature
    changed = {spec.kind for spec in signature.output_specs}
    if OutputKind.BUFFER_MUTATION in changed:
        raise TraceError("the model changes its buffers while it runs", fix="trace the model in eval mode")
    if OutputKind.PARAMETER_MUTATION in changed:
        raise TraceError(
            "the model changes its parameters while it runs",
            fix="if only the first call does (RWKV rescales its weights), run the model once in eval mode, then trace it",
        )
    state: dict[str, torch.Tensor] = {}
    for spec in signature.input_specs:
        if spec.kind in TENSORS and spec.target is not None:
            tensor = exported.state_dict.get(spec.target)
            tensor = exported.constants[spec.target] if tensor is None else tensor
            assert isinstance(tensor, torch.Tensor)
            state[spec.target] = tensor
    try:
        graph = clean(exported.graph, in_eval_mode=in_eval_mode)
    except TraceError as error:  # it writes into shared memory: torch itself can make that functional
        if functional:
            raise
        try:
            plain = without_dropout(exported.graph)
            aliased = exported
            if len(plain.nodes) < len(exported.graph.nodes):
                aliased = to_exported(LiftedProgram(exported, plain, tuple(signature.input_specs), state))
            without = aliased.run_decompositions({})
        except Exception:  # torch raises many errors for a graph that it cannot make functional
            raise error from None
        kinds = {spec.kind for spec in without.graph_signature.output_specs}
        if kinds & {OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION}:  # it changes the caller's values
            raise
        return lift(without, in_eval_mode=in_eval_mode, owned=owned, functional=True)
    return LiftedProgram(exported, graph, tuple(signature.input_specs), state if owned else own_all(state))


def refreshed(program: LiftedProgram) -> LiftedProgram:
    """A copy of the graph in which the shapes in the nodes' meta agree with the parameters."""
    graph = copy_graph(program.graph)
    holder = fx.GraphModule(program.exported.graph_module, graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    mode = next(n.meta["val"].fake_mode for n in graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))
    names = program.tensor_names()
    with mode:
        for node in inputs:
            tensor = program.state[names[node.name]] if node.name in names else None
            if tensor is not None and ("val" not in node.meta or node.meta["val"].shape != tensor.shape):
                node.meta["val"] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    with enable_python_dispatcher():  # some of torch's C++ ops do not accept symbolic sizes
        FakeTensorProp(holder, mode).propagate_dont_convert_inputs(*(node.meta.get("val") for node in inputs))
    return replace(program, graph=graph)


def to_exported(program: LiftedProgram) -> ExportedProgram:
    """An ExportedProgram of this graph, without tracing again. The shapes in its meta must be up to date."""
    exported, state = program.exported, program.state
    signature = copy.copy(exported.graph_signature)
    signature.input_specs = list(program.specs)
    outputs = zip(signature.output_specs, pytree.tree_leaves(program.graph.output_node().args[0]), strict=False)
    signature.output_specs = [
        replace(spec, arg=TensorArgument(node.name)) if isinstance(spec.arg, TensorArgument) else spec
        for spec, node in outputs
    ]
    stateless = {s.target for s in program.specs if s.kind == InputKind.CONSTANT_TENSOR or s.persistent is False}
    constants = {name: tensor for name, tensor in state.items() if name in stateless}
    return ExportedProgram(
        root=fx.GraphModule(exported.graph_module, program.graph),
        graph=program.graph,
        graph_signature=signature,
        state_dict={name: tensor for name, tensor in state.items() if name not in stateless},
        range_constraints=exported.range_constraints,
        module_call_graph=[copy.copy(entry) for entry in exported.module_call_graph],
        example_inputs=exported.example_inputs,
        constants={**{k: v for k, v in exported.constants.items() if k not in state}, **constants},
    )
