"""The torch host: a model that `torch.export` has traced, read, patched, run, differentiated and saved.

host.graph             the mechanism graph                                      read.py, ops/ (the table)
host.build(graph)      a host that computes an edited graph                     write.py
host.run([x], taps)    outputs, then the tapped values                          module.py
host.module()          a plain, trainable fx.GraphModule under the original parameter names
host.save(path)        ONNX by torch.onnx.export, from the program as it is
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from cmrc.errors import HostError, TraceError
from cmrc.hosts.autograd.arrays import from_numpy, to_numpy
from cmrc.hosts.autograd.derivatives import differentiate
from cmrc.hosts.autograd.learner import TorchLearner
from cmrc.hosts.fx.annotations import annotate, read_annotations
from cmrc.hosts.fx.clean import with_plain_layouts
from cmrc.hosts.fx.details import details
from cmrc.hosts.fx.draft import Fold, fold_now
from cmrc.hosts.fx.lifted import LiftedProgram, lift, refreshed, to_exported
from cmrc.hosts.fx.load import load_into
from cmrc.hosts.fx.memory import own_all
from cmrc.hosts.fx.module import Kind, LoweredModule, argument_names, kind_of, make_template, run_flat
from cmrc.hosts.fx.network import FxNetwork, watch
from cmrc.hosts.fx.piece import FxPiece, extract
from cmrc.hosts.fx.read import LiftedReading
from cmrc.hosts.fx.write import Written, write
from cmrc.hosts.protocols import Derivatives, DerivativesRequest, Host, Metadata, Runner
from cmrc.ir.graph import Array, Graph


@dataclass(frozen=True, slots=True)
class Patched:
    """A program, the code of its graph, and what a patch changed. Programs that differ only in parameters share the code.

    The tensors in `fresh` were made for this program; those in `changed` are not the traced model's.
    """

    program: LiftedProgram
    template: fx.GraphModule | None = None
    untied: tuple[str, ...] = ()
    fresh: frozenset[str] = frozenset()
    changed: frozenset[str] = frozenset()


class FxHost:
    """A lifted program and, once somebody asked for it, the module that is trained with its tensors.

    A program that is given as a function is made when it is needed. `stale` says that the shapes in its nodes' meta are from
    before a patch.
    """

    kind = "fx"

    def __init__(self, patched: Patched | Callable[[], Patched], *, stale: bool = False) -> None:
        if callable(patched):
            self._make = patched
        else:
            self._patched = patched
        self._stale = stale
        self._module: LoweredModule | None = None
        self._exported: Host | None = None
        # the types and shapes that the module's tensors must have: they may be written to in place
        self._kinds: dict[str, Kind] = {}

    @cached_property
    def _patched(self) -> Patched:
        return self._make()

    @property
    def _program(self) -> LiftedProgram:
        return self._patched.program

    @cached_property
    def _template(self) -> fx.GraphModule:
        return self._patched.template or make_template(self._program)

    @property
    def untied(self) -> tuple[str, ...]:
        return self._patched.untied

    @classmethod
    def from_exported(cls, exported: ExportedProgram, *, in_eval_mode: bool = False) -> FxHost:
        program = lift(exported, in_eval_mode=in_eval_mode)
        return cls(Patched(program, make_template(program)))

    # ------------------------------------------------------------ reading

    def contradiction(self) -> str:
        """Nothing: torch.export checks its results."""
        return ""

    def _present(self) -> LiftedProgram:
        """The program with the module's present tensors, which may have been replaced since."""
        if self._module is not None:
            before = self._program.state
            tensors = self._module.tensors(self._kinds)
            if any(tensors[name] is not tensor for name, tensor in before.items()):
                self._hold(tensors)
        return self._program

    def _hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._patched = replace(self._patched, program=replace(self._program, state=tensors))
        for cached in ("_read_program", "_run_program"):
            self.__dict__.pop(cached, None)

    @property
    def program(self) -> LiftedProgram:
        """The torch program, with shapes that are up to date."""
        program = self._present()
        if self._stale:
            self._patched, self._stale = replace(self._patched, program=refreshed(program)), False
        return self._program

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The parameters and buffers by name."""
        return self._present().state

    @cached_property
    def _read_program(self) -> LiftedReading:
        return LiftedReading(self.program)

    @property
    def _reading(self) -> LiftedReading:
        self._present()
        return self._read_program

    @property
    def graph(self) -> Graph:
        return self._reading.graph

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        return self._reading.names

    @property
    def inputs(self) -> Sequence[str]:
        """The arguments of the model's forward in order; those that the trace gave by keyword come last."""
        return [name for group in argument_names(self._program.exported) for name in group]

    def details(self) -> Mapping[str, str]:
        """A description of each call besides its operands, by the name of its node."""
        return details(self.program)

    # ------------------------------------------------------------ writing

    def build(self, graph: Graph) -> FxHost:
        return FxHost(self.patched(graph), stale=True)

    def write(self, graph: Graph, *, fold: Fold = fold_now) -> Written:
        """The program that computes an edited graph; `fold` makes its new tensors."""
        return write(self._reading, graph, fold=fold)

    def patched(self, graph: Graph) -> Patched:
        written, before = self.write(graph), self._reading.program.state
        fresh = frozenset(name for name, tensor in written.program.state.items() if before.get(name) is not tensor)
        new = written.new_graph
        return Patched(
            written.program,
            None if new else self._patched.template,
            written.untied if new else self.untied,
            fresh,
            self._patched.changed | fresh,
        )

    def annotate(self, entries: Sequence[tuple[str, dict[str, Any]]]) -> FxHost:
        present = self._present()
        program = replace(present, graph=annotate(present.graph, entries))
        return FxHost(replace(self._patched, program=program, fresh=frozenset()), stale=self._stale)

    def annotations(self) -> list[dict[str, Any]]:
        return read_annotations(self._program.graph)

    # ------------------------------------------------------------ as a module

    def module(self) -> LoweredModule:
        """A plain GraphModule: parameters as attributes under their own names, the model's own call signature.

        It is made once and shares no memory with the traced model. This host computes with its tensors from then on: after
        training, `run`, `save` and all others use the weights as they are.
        """
        if self._module is None:
            state = self._program.state
            self._kinds = {name: kind_of(tensor) for name, tensor in state.items()}
            kept = own_all({name: tensor for name, tensor in state.items() if name not in self._patched.fresh})
            self._hold({name: kept.get(name, tensor) for name, tensor in state.items()})
            self._module = self._assemble(self._program.state)
        return self._module

    def new_module(self, *, share: bool = False) -> LoweredModule:
        """Another module with the same weights; with `share`, unchanged tensors share the traced model's memory."""
        state = own_all(self.state)
        if share:
            exported = self._program.exported
            traced = {**exported.constants, **exported.state_dict}
            state |= {name: traced[name] for name in state if name not in self._patched.changed}
        return self._assemble(state)

    def _assemble(self, tensors: Mapping[str, torch.Tensor]) -> LoweredModule:
        return LoweredModule.assemble(self._template, tensors)

    def unequal(self, other: Host) -> tuple[str, ...]:
        """The parameters and buffers whose numbers differ from those of another host."""
        theirs = other.state if isinstance(other, FxHost) else {}
        return tuple(
            name
            for name, tensor in self.state.items()
            if name not in theirs or (theirs[name] is not tensor and not torch.equal(theirs[name], tensor))
        )

    def load_into(
        self, model: torch.nn.Module, *, graph: Graph, original: Host, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        tensors = own_all({name: self.state[name] for name in self.unequal(original)})
        load_into(model, tensors, original.graph, graph, self._runner, args, kwargs)

    def to_exported(self) -> ExportedProgram:
        """An ExportedProgram of this graph, without tracing again."""
        return to_exported(self.program)

    def to_onnx(self, output_names: Sequence[str] | None = None) -> Any:
        """The program as an onnx_ir model, by torch's own exporter."""
        from cmrc.hosts.fx.export import to_onnx  # only saving needs onnx

        plain = replace(self.program, graph=with_plain_layouts(self.program.graph))
        return to_onnx(to_exported(plain), output_names)

    def exported(self) -> Host | None:
        """The model as an ONNX host, exported once."""
        if self._exported is None or self._module is not None:  # a module may have been trained since
            self._exported = self._to_onnx_host()
        return self._exported

    def _to_onnx_host(self, output_names: Sequence[str] | None = None) -> Host:
        from cmrc.hosts.onnx.host import OnnxHost  # only saving needs onnx; that host does not know this one

        return OnnxHost.from_model(self.to_onnx(output_names))

    def save(
        self,
        path: Path,
        metadata: Metadata = dict,
        *,
        overwrite: bool = False,
        output_names: Sequence[str] | None = None,
    ) -> tuple[int, int] | None:
        host = self.exported() if output_names is None else None
        host = self._to_onnx_host(output_names) if host is None else host
        entries = [_carried(entry, host) for entry in self.annotations()]
        return (host.annotate(entries) if entries else host).save(path, metadata, overwrite=overwrite)

    # ------------------------------------------------------------ running

    @cached_property
    def _run_program(self) -> LoweredModule:
        return self._assemble(self._program.state).eval()

    @property
    def _runner(self) -> LoweredModule:
        """A module in eval mode with this host's own tensors, which nobody writes to through it."""
        self._present()
        return self._run_program

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], taps: Sequence[str] = ()) -> list[Array]:
        args = self._arguments(inputs)
        seen: dict[str, Any] = {}
        with torch.no_grad():
            outputs = _run_with_taps(self._runner, args, seen, taps) if taps else self._runner(*args)
        flat = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
        return [to_numpy(t) for t in (*flat, *(seen[name] for name in taps))]

    def runner(self) -> Runner:
        network = FxNetwork.train(self.new_module(), (), self._arguments)

        def run(inputs: Mapping[str, Array], taps: Sequence[str]) -> list[Array]:
            with torch.no_grad():
                outputs, values = network.run(inputs, taps)
            return [to_numpy(tensor) for tensor in (*outputs, *(values[name] for name in taps))]

        return run

    def bind(self, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
        """The tensors among the arguments, by the names of the graph's inputs."""
        flat = pytree.tree_leaves(self._arguments(inputs))
        names = [spec.arg.name for spec in self._program.specs if spec.kind == InputKind.USER_INPUT]
        tensors = {value.name for value in self.graph.inputs}
        return {name: to_numpy(t) for name, t in zip(names, flat, strict=True) if name in tensors}

    def extract(self, inputs: Sequence[str], outputs: Sequence[str], *, beyond: Collection[str] = ()) -> FxPiece:
        return extract(self._present(), inputs, outputs, beyond)

    def differentiate(self, request: DerivativesRequest) -> list[Derivatives]:
        """The derivatives of a loss by inner values, for one batch."""
        outputs, seen = watch(self._runner, self._arguments(request.inputs), request.values)
        return differentiate(self.graph, seen, outputs[0], request)

    def learner(self, trained: Collection[str]) -> TorchLearner:
        """A separate module for training; `with_parameters` brings its parameters back."""
        return TorchLearner(FxNetwork.train(self.new_module(), trained, self._arguments), "")

    def with_parameters(self, arrays: Mapping[str, Array]) -> FxHost:
        """A host with the same graph and other numbers in these parameters; tied parameters stay tied."""
        state = own_all(self.state)
        written = set[str]()
        for name, array in arrays.items():
            before = state[name]
            tensor = from_numpy(np.array(array)).to(before)
            tensor = torch.nn.Parameter(tensor) if isinstance(before, torch.nn.Parameter) else tensor
            tied = [other for other, one in state.items() if one is before]
            state |= dict.fromkeys(tied, tensor)
            written.update(tied)
        changed = self._patched.changed | written
        program = replace(self._present(), state=state)
        patched = replace(self._patched, program=program, fresh=changed, changed=changed)
        return FxHost(patched, stale=self._stale)

    def _arguments(self, inputs: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        """The arguments of the model's forward, in order, on the device of its parameters."""
        names = list(self.inputs)
        fits = set(inputs) == set(names) if isinstance(inputs, Mapping) else len(inputs) == len(names)
        if not fits:
            given = f"{', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else f"{len(inputs)} in order"
            problem = f"the model takes the inputs {', '.join(names)} (given: {given})"
            raise HostError(problem, fix="give each of them once")
        ordered = [inputs[name] for name in names] if isinstance(inputs, Mapping) else list(inputs)
        device = next((tensor.device for tensor in self.state.values()), None)
        return [pytree.tree_map(lambda leaf: _as_tensor(leaf, device), value) for value in ordered]


def _run_with_taps(module: fx.GraphModule, args: Sequence[Any], seen: dict[str, Any], taps: Sequence[str]) -> Any:
    class Tapped(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.name in taps:
                seen[n.name] = result
            return result

    return run_flat(Tapped(module), args)


def _carried(entry: dict[str, Any], host: Host) -> tuple[str, dict[str, Any]]:
    """A do of the torch graph for the graph that it was exported to: at the value of the same name."""
    for name in (entry["site"], entry["value"]):
        values = host.names.get(name, ())
        if len(values) == 1:
            return values[0], {**entry, "value": values[0]}
    raise HostError(
        "the exported model has no value of this name",
        node=entry["site"],
        fix="lower the torch program and save that, or export it and annotate the ONNX model",
    )


def _as_tensor(value: Any, device: torch.device | None) -> Any:
    """The arguments of the model, on the device of its parameters."""
    if isinstance(value, np.ndarray):
        value = from_numpy(value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def is_torch_model(model: object) -> bool:
    return isinstance(model, (torch.nn.Module, ExportedProgram))


EXPORT_FIX = (
    "make `torch.export.export(model, args)` work: strict=True if tracing fails inside Python code, dynamic_shapes=None to fix all sizes "
    "to those of the example, torch.cond or a constant for a branch that depends on numbers, use_cache=False and "
    'attn_implementation="sdpa" for a transformers model; or export the model to ONNX and trace that file'
)


def trace(model: torch.nn.Module | ExportedProgram, args: Any, options: Mapping[str, Any]) -> FxHost:
    """Export the model in eval mode (its own mode is restored) and read the graph."""
    if isinstance(model, ExportedProgram):
        return FxHost.from_exported(model)
    if not isinstance(args, tuple) or not (args or options.get("kwargs")):
        problem = (
            "there are no example inputs"
            if args is None or isinstance(args, tuple)
            else "the example inputs are not a tuple"
        )
        fix = "give them as a tuple: cmrc.trace(model, (x,)), or lower(..., args=(x,))"
        raise TraceError(f"{problem} for {type(model).__name__}", fix=fix)
    was_training = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        exported = torch.export.export(model, args, **options)
    except Exception as error:
        raise TraceError(
            f"torch.export cannot trace {type(model).__name__}: {str(error).strip()}",
            fix=EXPORT_FIX,
        ) from error
    finally:
        for name, module in model.named_modules():
            module.training = was_training[name]
    return FxHost.from_exported(exported, in_eval_mode=True)
