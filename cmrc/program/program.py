"""`cmrc.trace` and its result: a model's host, its IR, its sites and groups, and the plan that the model is annotated with, if any."""

from __future__ import annotations

import difflib
import fnmatch
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cmrc.errors import CmrcError, GraphError, SiteError, TraceError
from cmrc.hosts.protocols import Host
from cmrc.ir.cost import Cost, cost
from cmrc.ir.fingerprint import Fingerprint, fingerprint
from cmrc.ir.graph import Array, Graph, Leaf, Tensor, leaves_of
from cmrc.ir.verify import verify_graph
from cmrc.passes.pipeline import put_dos
from cmrc.program.dry_run import try_group, try_site
from cmrc.program.groups import Group, find_groups
from cmrc.program.plan import Plan
from cmrc.program.plan_entry import entry_from_json, entry_to_json, pack_text, unpack_text
from cmrc.program.sites import Site, Sites


@dataclass(eq=False, repr=False)
class Program(Sites):
    """What `cmrc.trace` returns. `args` and `options` are the arguments of the trace, for tracing the same module again.

    With `exports_once` a torch model is exported once, and each plan is lowered in the export: from the second file on (`exported.py`).
    """

    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    exports_once: bool = False

    def __repr__(self) -> str:
        return f"Program({self.host.kind}, {len(self.graph.nodes)} nodes, {len(self.axes)} sites)"

    @property
    def graph(self) -> Graph:
        """The IR, verified once. Graphs derived from it are verified only where they differ."""
        return self._graph

    @cached_property
    def _graph(self) -> Graph:
        with blaming_contradictions(self.host):
            verify_graph(self.host.graph)
            return self.host.graph

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> Fingerprint:
        return fingerprint(self.graph, self.host.details())

    @cached_property
    def _cost(self) -> Cost:
        return cost(self.graph, since=self.graph)

    @cached_property
    def numbers_read(self) -> int | None:
        """The numbers of the parameters that nodes read as they are. None if one of them is also read through a computation of the
        host: that keeps all of it in the file."""
        read = [o for node in self.graph.nodes for o in node.inputs if isinstance(o, Tensor)]
        plain = {o.name: math.prod(o.shape) for o in read if isinstance(o, Leaf) and not o.parts}
        computed = (leaf for o in read if not isinstance(o, Leaf) or o.parts for leaf in leaves_of(o))
        if any(part.name in plain for leaf in computed for part in leaf.parts or (leaf,)):
            return None
        return sum(plain.values())

    def cost(self, sizes: Mapping[str, int] | None = None) -> Cost:
        return cost(self.graph, sizes, since=self.graph) if sizes else self._cost

    # ------------------------------------------------------------ sites

    def sites(self, pattern: str = "*", *, folds: bool = True) -> list[Site]:
        """All sites in the order of the graph. `folds=False` leaves out how each one folds, which needs a dry run per site."""
        sites = self.list_sites(pattern)
        return [self.describe(site) for site in sites] if folds else sites

    def describe(self, site: Site) -> Site:
        """The same site with how it folds: a dry run."""
        with blaming_contradictions(self.host):
            return replace(site, folding=try_site(self.graph, site.value, site.axis))

    # ------------------------------------------------------------ groups

    @cached_property
    def _groups(self) -> list[Group]:
        with blaming_contradictions(self.host):
            return find_groups(self)

    def groups(self, pattern: str = "*", *, folds: bool = True) -> list[Group]:
        """Which units are coupled, and why: residual streams, concatenations, products, grouped convolutions.

        `folds=False` leaves out what becomes of a replaced unit, which needs a dry run per group.
        """
        groups = [group for group in self._groups if fnmatch.fnmatchcase(group.name, pattern)]
        with blaming_contradictions(self.host):
            return [replace(group, folding=try_group(self.graph, group)) for group in groups] if folds else groups

    def group(self, name: str, *, at: str = "") -> Group:
        """The group of this name, or the one that the site of this name writes."""
        values = self.names.get(name, ())
        meant = [group for group in self._groups if group.name == name]
        meant = meant or [g for g in self._groups if any(w.value in values or w.site == name for w in g.writers)]
        if len(meant) == 1:
            return meant[0]
        names = [group.name for group in self._groups]
        if meant:
            listed = ", ".join(group.name for group in meant)
            raise SiteError(f"{name!r} belongs to {len(meant)} groups", at=at, fix=f"name one: {listed}")
        near = difflib.get_close_matches(name, names, n=5, cutoff=0.5) or names[:5]
        fix = f"there are: {', '.join(near)}" if near else "nothing is coupled here: plan.do replaces units of a site"
        raise SiteError(f"no group is called {name!r}", at=at, fix=fix)

    # ------------------------------------------------------------ plans

    def annotate(self, plan: Plan) -> Program:
        """A copy of the model with the do's written on its nodes. They survive saving and tracing again."""
        self.require(plan)
        hidden = {name: node.name for name, (node, _) in self.hidden_states.items()}
        entries = [(hidden.get(e.value, e.value), entry_to_json(e, pack_text)) for e in plan.entries]
        return Program(self.host.annotate(entries), self.args, self.options)

    @cached_property
    def plan(self) -> Plan | None:
        """The plan that the model is annotated with, if any."""
        entries = self.host.annotations()
        if not entries:
            return None
        dos = [entry_from_json(entry, unpack_text, f"annotation: do[{i}]") for i, entry in enumerate(entries)]
        plan = Plan(self, dos, source="annotation")
        plan.check(self)
        return plan

    def require(self, plan: Plan) -> None:
        """Check that a plan is for this model and fits it."""
        if plan.program is self:
            return
        if plan.fingerprint is not None:
            plan.fingerprint.require(self.fingerprint, plan.source)
        plan.check(self)

    def with_dos(self, plan: Plan) -> Graph:
        """The IR with the plan's do nodes in place: the literal meaning of the plan."""
        return put_dos(self.graph, plan.entries)

    def clamped(self, plan: Plan) -> Host:
        """The model with its units literally replaced at run time: the reference for every lowering."""
        with blaming_contradictions(self.host):
            return self.host.build(self.with_dos(plan))

    @cached_property
    def _literal(self) -> Host:
        return self.host if self.plan is None else self.clamped(self.plan)

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], taps: Sequence[str] = ()) -> list[Array]:
        """Run the model. An annotated model runs literally, with its units replaced."""
        return self._literal.run(inputs, taps)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the model with its annotations as ONNX. The file that it was loaded from is overwritten only with `overwrite=True`."""
        with blaming_contradictions(self.host):
            self.host.save(Path(path), overwrite=overwrite)
        self.exports_once = True


def trace(model: Any, args: tuple[Any, ...] = (), **options: Any) -> Program:
    """Read a model into a Program. A Program is returned as it is.

    The model is a path to an ONNX file, an onnx.ModelProto or an onnx_ir.Model; or an nn.Module with example inputs
    (and torch.export's options, such as `dynamic_shapes`), or an ExportedProgram; or a folder that `save_pretrained`
    wrote, whose weights stay in their files until they are needed. Give inputs of an ONNX model that always have the
    same value as `assume={"sr": 16000}`: they become constants, and everything that depends only on them is computed.
    """
    if isinstance(model, Program):
        return model
    if isinstance(model, (str, Path)) and Path(model).is_dir():
        return _trace_folder(Path(model), args, options)
    module = type(model).__module__.split(".")[0]
    if isinstance(model, (str, Path)) or module in ("onnx", "onnx_ir"):
        from cmrc.hosts.onnx.host import OnnxHost

        assume = options.get("assume")
        if isinstance(model, (str, Path)):
            return Program(OnnxHost.load(model, assume=assume))
        return Program(OnnxHost.from_model(model, assume=assume))
    if "torch" in sys.modules:  # whoever has a torch model has imported torch
        from cmrc.hosts.fx.host import is_torch_model
        from cmrc.hosts.fx.host import trace as trace_torch

        if is_torch_model(model):
            return Program(trace_torch(model, args, options), args, options)
    raise TraceError(
        f"cannot trace a {type(model).__name__}",
        fix="give a path to an ONNX file, an onnx(_ir) model, an nn.Module with example inputs, or an ExportedProgram",
    )


def _trace_folder(folder: Path, args: tuple[Any, ...], options: dict[str, Any]) -> Program:
    if not (folder / "config.json").is_file():
        raise TraceError(
            f"the folder {folder} has no config.json",
            fix="give an ONNX file, or a folder that save_pretrained wrote",
        )
    if find_spec("torch") is None:
        raise TraceError("a checkpoint folder needs torch", fix="pip install 'cmrc[torch]' transformers")
    from cmrc.hosts.fx.checkpoint import trace_checkpoint

    return Program(*trace_checkpoint(folder, args, options))


EXPORT_AGAIN = "see what onnx.checker.check_model(model, full_check=True) says, and export the model again"


NEVER_CONTRADICTED = (OSError, ImportError, NameError, NotImplementedError)
"""Errors that a contradiction in the model cannot cause: a full disk, a missing package, a mistake in cmrc itself.

Sizes and names that do not fit may raise any other error, even MemoryError if a size is absurd.
"""


@contextmanager
def blaming_contradictions(host: Host) -> Iterator[None]:
    """In this context, a failure is reported as an error in the model if the model's own framework refuses it. Otherwise it is a fault of cmrc.

    The framework is asked only after a failure: many models that it refuses can still be read and lowered.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, NEVER_CONTRADICTED) or (
            isinstance(error, CmrcError) and not isinstance(error, GraphError)
        ):
            raise
        problem = host.contradiction()
        if not problem:
            raise
        node, op = (error.node, error.op) if isinstance(error, GraphError) else ("", "")
        raise TraceError(f"the model contradicts itself: {problem}", node=node, op=op, fix=EXPORT_AGAIN) from error
