"""A wrong rule turns the suite red: each mutant below must change the meaning of at least one small example.

The examples are those of the golden tests, so this also says that they are sharp enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from graphs import batch
from meaning import gap, outputs_of
from rewrites.affine import AFFINE
from rewrites.constant import CONSTANT
from rewrites.dead import DEAD
from rewrites.runtime import RUN_TIME
from rewrites.start import Example
from rules import SIZES, Pass
from tolerances import EXACT_F64, MOVES

from cmrc.ir import ops
from cmrc.ir.graph import Apply, Graph, Leaf, Node, Operand, leaves_of
from cmrc.ir.verify import verify_graph
from cmrc.passes import affine_fold, constant_fold, dead_subgraph
from cmrc.passes.rewriting import absorb, contract, convolution, rewriter, runtime
from cmrc.passes.rewriting.rewriter import Log

Patch = Callable[[pytest.MonkeyPatch], None]


def broken(run: Pass, examples: dict[str, Example]) -> list[str]:
    """The examples whose meaning a pass changes by far more than rounding, or on which it fails."""
    results = []
    for name, build in examples.items():
        graph = build()
        inputs = batch(graph, **SIZES)
        try:
            after, _ = run(graph, Log())
            verify_graph(after)
            distance = gap(outputs_of(after, inputs), outputs_of(graph, inputs))
        except Exception:  # a mutant may also fall over
            distance = np.inf
        if distance > MOVES * EXACT_F64:
            results.append(name)
    return results


PASSES: dict[str, tuple[Pass, dict[str, Example]]] = {
    "constant_fold": (
        constant_fold.run,
        {**CONSTANT, **{f"run-time-{name}": build for name, build in RUN_TIME.items()}},
    ),
    "affine_fold": (affine_fold.run, AFFINE),
    "dead_subgraph": (dead_subgraph.run, DEAD),
}


@pytest.mark.parametrize("name", PASSES)
def test_the_rules_as_they_are_break_nothing(name: str) -> None:
    assert broken(*PASSES[name]) == []


# ---------------------------------------------------------------- mutants


def wrapped(modules: Any, name: str, change: Callable[..., Any]) -> Patch:
    """Replace a function, as these modules call it, by one that gets the original and its arguments."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        for module in modules if isinstance(modules, tuple) else (modules,):
            original = getattr(module, name)
            monkeypatch.setattr(module, name, partial(change, original))

    return patch


def meaning(op: str, change: Callable[..., Any]) -> Patch:
    """Replace what an op of the folding means. The reference does not use these ops."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        spec = ops.OPS[op]
        changed = replace(spec, meaning=lambda *args: change(spec.meaning, *args))
        monkeypatch.setitem(ops.OPS, op, changed)

    return patch


def forget_constants(original: Any, sweep: Any, node: Node, x: str, units: Any, slab: Any, mix: Any = None) -> Any:
    return original(sweep, node, x, units, np.zeros_like(slab), mix)


def forget_mix(original: Any, sweep: Any, node: Node, x: str, units: Any, slab: Any, mix: Any = None) -> Any:
    return original(sweep, node, x, units, slab, None)


def shifted(original: Any, units: Sequence[int], size: int) -> Any:
    return original([(u + 1) % size for u in units], size)


def negated(original: Any, first: Any, second: Any, scale: float = 1.0, dtype: str = "") -> Any:
    return original(first, second, -scale, dtype)


def only_weights(original: Any, bias: Any, second: Any, scale: float = 1.0, dtype: str = "") -> Any:
    return original(None, second, scale, dtype)


def raw_constants(original: Any, node: Node, facts: Any, axis: int, units: Any) -> Any:
    return np.zeros_like(original(node, facts, axis, units)) + 0.5


def reversed_keep(original: Any, tensor: Any, axis: int, keep: Any) -> Any:
    return original(tensor, axis, tuple(reversed(keep)))


def reversed_slab(original: Any, *args: Any) -> Any:
    slab = original(*args)
    return slab if isinstance(slab, str) else np.flip(slab)


def another_axis(original: Any, node: Node, position: int, shape: Any, axis: int) -> Any:
    return None


def off_by_one(original: Any, *args: Any, **kwargs: Any) -> Any:
    moved = original(*args, **kwargs)
    return moved if isinstance(moved, str) else replace(moved, index=tuple(i - 1 if i else 1 for i in moved.index))


def share_the_fold(original: Any, graph: Graph, log: Log) -> Any:
    """Write the folded weight back over the parameter, as if no one else read it."""
    after, changed = original(graph, log)
    folded = {
        leaf.name: part
        for node in after.nodes
        for operand in node.inputs
        if isinstance(operand, Apply)
        for part in parts(operand)
        if part.op == "fold_columns"
        for leaf in leaves_of(part)
    }
    swap: Callable[[Operand], Operand] = lambda o: folded.get(o.name, o) if isinstance(o, Leaf) else o  # noqa: E731
    nodes = tuple(replace(node, inputs=tuple(map(swap, node.inputs))) for node in after.nodes)
    return replace(after, nodes=nodes), changed


def parts(tensor: Any) -> list[Apply]:
    return [tensor, *(p for part in tensor.inputs for p in parts(part))] if isinstance(tensor, Apply) else []


MUTANTS: dict[str, tuple[str, Patch, set[str]]] = {
    "linear forgets the constants": (
        "constant_fold", wrapped(constant_fold, "fold_into_linear", forget_constants), {"linear", "linear-by-position"}),
    "conv forgets the constants": (
        "constant_fold", wrapped(convolution, "fold_into_conv", forget_constants), {"conv", "conv-padded", "conv-in-groups"}),
    "the old bias is lost": ("constant_fold", wrapped((absorb, convolution), "add_tensors", only_weights), {"linear", "conv"}),
    "the constants have the wrong sign": ("constant_fold", wrapped((absorb, convolution), "add_tensors", negated), {"linear", "conv"}),
    "the wrong columns stay": ("constant_fold", wrapped(absorb, "complement", shifted), {"linear", "conv"}),
    "the border is forgotten": (
        "constant_fold", wrapped(convolution, "has_border", lambda original, node: False),
        {"conv-padded", "conv-padded-at-any-size", "conv-depthwise-padded"}),
    "a group's columns are another group's": (
        "constant_fold",
        meaning("select_in_groups", lambda original, attrs, w: original({"keep": attrs["keep"][::-1]}, w)),
        {"conv-in-groups"}),
    "constants do not go through the function": (
        "constant_fold", wrapped(constant_fold, "_evaluate_pointwise", raw_constants), {"pointwise", "pointwise-batch-norm"}),
    "a parameter is not taken at the units": (
        "constant_fold", wrapped(constant_fold, "operand_axis", another_axis), {"pointwise-batch-norm"}),
    "a zero in one factor drops the other's constants": (
        "constant_fold",
        wrapped(constant_fold, "_rest_of_operand", lambda original, sweep, node, i, fact, gone, whole: fact.source),
        {"pointwise-disjoint-zeros", "pointwise-residual", "pointwise-gate"}),
    "a reshaped slab is turned around": (
        "constant_fold", wrapped(constant_fold, "move_slab", reversed_slab), {"reshape"}),
    "units move one too far": ("constant_fold", wrapped(constant_fold, "move", off_by_one), {"reshape"}),
    "constants known only at run time are added to the wrong weight": (
        "constant_fold", wrapped(runtime, "conv_columns", lambda original, w, node, keep: original(w, node, keep[::-1])),
        {"conv-depthwise-padded-at-any-size", "run-time-conv"}),
    "affine parts are forgotten in linear": (
        "affine_fold", wrapped(affine_fold, "fold_into_linear", forget_mix), {"linear", "reshape", "concat", "do"}),
    "affine parts are forgotten in conv": (
        "affine_fold", wrapped(affine_fold, "fold_into_conv", forget_mix), {"conv", "conv-in-groups", "conv-transposed"}),
    "the constant part is forgotten": (
        "affine_fold", wrapped(affine_fold, "fold_into_linear", forget_constants), {"linear", "along"}),
    "the mix is turned": (
        "affine_fold", meaning("fold_columns", lambda original, attrs, w, mix: original(attrs, w, mix.T)), {"linear", "conv"}),
    "units and parents change roles": (
        "affine_fold",
        meaning("fold_columns", lambda original, attrs, w, mix: original(
            {**attrs, "units": attrs["parents"], "parents": attrs["units"]}, w, mix)),
        {"linear", "conv"}),
    "the fold overwrites a shared parameter": (
        "affine_fold", wrapped(affine_fold, "run", share_the_fold), {"linear-shared"}),
    "blocks are laid out position by position": (
        "affine_fold",
        wrapped(affine_fold, "blocks", lambda original, *args: (
            outcome if isinstance(outcome := original(*args), str) else (outcome[0], outcome[1].T.reshape(outcome[1].shape)))),
        {"reshape"}),
    "rows are dropped in reverse": (
        "dead_subgraph", wrapped((dead_subgraph, rewriter), "take", reversed_keep), {"linear", "conv", "pointwise", "embedding"}),
    "a broadcast operand is not told from another": (
        "dead_subgraph", wrapped(dead_subgraph, "operand_axis", another_axis), {"pointwise"}),
    "a reshape selects the neighbours": ("dead_subgraph", wrapped(rewriter, "move", off_by_one), {"reshape"}),
    "readers do not count anew": (
        "dead_subgraph", wrapped(dead_subgraph, "settle_readers", lambda original, *args: None), {"linear"}),
    "the wrong key-value heads stay": (
        "dead_subgraph", wrapped(contract, "shared_heads", lambda original, keep, heads, served: list(range(len(keep) // 2))),
        {"attention-with-shared-heads"}),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_rule_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, patch, expected = MUTANTS[mutant]
    patch(monkeypatch)
    module = {"constant_fold": constant_fold, "affine_fold": affine_fold, "dead_subgraph": dead_subgraph}[name]
    broken_rules = broken(lambda graph, log: module.run(graph, log), PASSES[name][1])
    assert broken_rules
    assert expected <= set(broken_rules)
