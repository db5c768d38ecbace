"""Whether a graph is well formed: every operand is defined, every name unique, and every node fits what its op declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cmrc.errors import GraphError
from cmrc.ir.graph import Graph, Node, Operand, Value
from cmrc.ir.ops import OPS
from cmrc.ir.spec import Op, OperandSpec, Takes


def verify_graph(graph: Graph, *, since: Graph | None = None) -> None:
    """Check that operands are defined before their use, names are unique, and every node fits its op's spec: operands, attributes, shapes.

    `since` is a verified graph: its nodes are not checked again if they read the very same values, and attributes that it
    shares are not checked again either.
    """
    verified = {id(node.attrs): node for node in since.nodes} if since is not None else {}
    before = since.by_name if since is not None else {}
    values = {value.name: value for value in graph.inputs}
    changed = {name for name, value in values.items() if before.get(name) is not value}
    for node in graph.nodes:
        known = verified.get(id(node.attrs))
        fits = known is node
        for operand in node.inputs:
            if type(operand) is str:
                if operand not in values:
                    raise GraphError(node.label, node.kind, f"reads %{operand} before it is defined")
                if operand in changed:
                    fits = False
        if not fits:
            problem = _problem(node, values, same_attributes=known is not None and known.op == node.op)
            if problem:
                raise GraphError(node.label, node.kind, problem)
        for value in node.outputs:
            name = value.name
            if name in values:
                raise GraphError(node.label, node.kind, f"defines %{name} a second time")
            values[name] = value
            if known is not node and before.get(name) is not value:
                changed.add(name)
    for name in graph.outputs:
        if name not in values:
            raise GraphError("output", "output", f"%{name} is not defined")


def _problem(node: Node, values: Mapping[str, Value], *, same_attributes: bool) -> str:
    """What is wrong with a node that reads these values, or nothing."""
    op = OPS.get(node.op)
    if op is None or op.shape is None:
        raise GraphError(node.label, node.op, "is not an op of the IR")
    # What the declarations say depends on these forms alone. Few of them occur, and each is checked once.
    form: tuple[object, ...] = tuple(map(type, node.inputs))
    if form not in op.fitting_forms:
        problem = _operand_problem(op.operands, node.inputs)
        if problem:
            return problem
        op.fitting_forms.add(form)
    if not same_attributes:
        attrs = node.attrs
        form = (str(attrs.get("fn")), *attrs, *map(type, attrs.values()))
        if form not in op.fitting_forms:
            problem = _attribute_problem(op, attrs)
            if problem:
                return problem
            op.fitting_forms.add(form)
    shapes = [values[o].shape if isinstance(o, str) else None if o is None else o.shape for o in node.inputs]
    return op.shape(node, shapes)


def _operand_problem(declared: tuple[OperandSpec, ...], inputs: tuple[Operand, ...]) -> str:
    if len(inputs) > len(declared) and not (declared and declared[-1].repeated):
        return f"has {len(inputs)} operands, {len(declared)} are declared"
    for parameter, operand in zip(declared, inputs, strict=False):
        if operand is None:
            if not parameter.optional:
                return f"has no operand {parameter.name!r}"
        elif parameter.takes is Takes.VALUE and not isinstance(operand, str):
            return f"its operand {parameter.name!r} is a tensor"
    for parameter in declared[len(inputs) :]:
        if not parameter.optional:
            return f"has no operand {parameter.name!r}"
    return ""


def _attribute_problem(op: Op, attrs: Mapping[str, Any]) -> str:
    if not attrs.keys() >= op.required:
        return f"has no attribute {min(op.required - attrs.keys())!r}"
    allowed = op.classes
    for name, given in attrs.items():
        classes = allowed.get(name)
        if classes is None:
            return f"has an attribute {name!r} that the op does not declare"
        if not isinstance(given, classes):
            return f"its attribute {name!r} is {given!r}"
    return _option_problem(op, attrs) if op.functions else ""


def _option_problem(op: Op, attrs: Mapping[str, Any]) -> str:
    function = op.functions.get(attrs["fn"])
    if function is None:
        return f"there is no function {attrs['fn']!r}"
    for name in function.needs:
        if name not in attrs:
            return f"has no attribute {name!r}"
    for name in attrs:
        if name not in op.own and name not in function.needs and name not in function.options:
            return f"has an attribute {name!r} that {attrs['fn']!r} does not take"
    return ""
