"""Write an edited IR into a copy of the lifted torch graph: rewired arguments, new parameters, patched sizes.

Nodes that did not change in the IR do not change here. If only parameters changed, there is no copy: the result shares the
graph (and the code made from it) with the model.

parameters   which parameters change, and what they hold      patch    changed nodes of the model
draft        the copy while it is patched                     insert   nodes that the passes inserted
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cmrc.errors import HostError
from cmrc.hosts.fx.annotations import drop_annotations
from cmrc.hosts.fx.draft import Draft, Fold, NewParameters, fold_now
from cmrc.hosts.fx.insert import insert_nodes
from cmrc.hosts.fx.lifted import LiftedProgram
from cmrc.hosts.fx.patch import new_sizes, patch_node, patch_parts
from cmrc.hosts.fx.read import SHAPED, LiftedReading
from cmrc.hosts.fx.schema import Arguments
from cmrc.ir.graph import Graph, Leaf, Node, Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A patched program. Without a `new_graph`, it shares the graph of the original program.

    `expressions` has the expressions of its changed and new parameters.
    """

    program: LiftedProgram
    new_graph: bool
    expressions: Mapping[str, Tensor]
    untied: tuple[str, ...] = ()


def write(reading: LiftedReading, graph: Graph, *, fold: Fold = fold_now) -> Written:
    """The program of `reading`, changed so that it computes `graph`. Annotations are removed: their do's were carried out."""
    before, left = reading.by_name, {node.name: node for node in graph.nodes}
    changed: list[tuple[Node, Node]] = []
    inserted = False
    for name, node in left.items():
        was = before.get(name)
        if was is None and node.origin:
            raise HostError("is not a node of the graph that is patched", node=node.label, op=node.kind)
        if was is not None and was is not node:
            changed.append((was, node))
        inserted = inserted or not node.origin
    parameters = NewParameters(reading, left, [node for _, node in changed], fold)
    patched = [(was, node) for was, node in changed if _differs(was, node, parameters, reading)]
    same = len(left) == len(before) and graph.outputs == reading.graph.outputs
    if same and not (patched or inserted or parameters.untied or reading.annotated):
        return Written(replace(reading.program, state=parameters.state), new_graph=False, expressions=parameters.forms)
    draft = Draft(reading, parameters)
    if inserted:
        insert_nodes(draft, graph)
    for was, node in patched:
        patch_node(draft, was, node)
    patch_parts(draft, graph)
    _patch_outputs(draft, graph)
    _drop_unread(draft, before.keys() - left.keys())
    if reading.annotated:
        drop_annotations(draft.lifted)
    program = replace(reading.program, graph=draft.lifted, specs=tuple(draft.specs), state=draft.state)
    return Written(program, new_graph=True, expressions=draft.expressions(), untied=tuple(parameters.untied))


def _differs(was: Node, now: Node, parameters: NewParameters, reading: LiftedReading) -> bool:
    """Whether a node of the torch graph must change. If it only reads the same parameters in a new form, it need not."""
    if (was.attrs is not now.attrs and was.attrs != now.attrs) or now.marks.narrowed:
        return True
    if len(was.inputs) != len(now.inputs) or was.op != now.op:
        return True
    for old, new in zip(was.inputs, now.inputs, strict=True):
        form = parameters.forms.get(old.name, old) if isinstance(old, Leaf) else old
        if new is not form and new != form:
            return True
    if now.op not in SHAPED or now.output.shape == was.output.shape:
        return False
    return new_sizes(was, now, reading.reads[now.name], Arguments(reading.calls[now.origin])) is not None


def _patch_outputs(draft: Draft, graph: Graph) -> None:
    """Return other nodes as outputs. An inserted node takes over the name: in ONNX it is the output's name."""
    output = draft.lifted.output_node()
    for was, now in dict(zip(draft.reading.graph.outputs, graph.outputs, strict=True)).items():
        old, new = draft.nodes[was], draft.nodes[now]
        if old is new:
            continue
        output.replace_input_with(old, new)
        if new.name not in draft.values:
            old.name, new.name = f"{was}_before", was


def _drop_unread(draft: Draft, dropped: set[str]) -> None:
    """Remove nodes that the passes dropped, and the parameters that nobody reads any more."""
    unread_before = draft.reading.unread
    for node in reversed(list(draft.lifted.nodes)):
        if node.users:
            continue
        idle = node.name in unread_before or node.op in ("output", "placeholder") or node.is_impure()
        if node.name in dropped or not idle:
            draft.lifted.erase_node(node)
    placeholders = draft.placeholders
    gone = {name for name, node in placeholders.items() if not node.users and node.name not in unread_before}
    if not gone:
        return
    # If nothing of a module is read any more, its unread buffers go too, such as the counter of a batch norm.
    left = {name.rpartition(".")[0] for name, node in placeholders.items() if node.users}
    owners = {name.rpartition(".")[0] for name in gone} - left
    draft.drop(gone | {n for n, node in placeholders.items() if not node.users and n.rpartition(".")[0] in owners})
