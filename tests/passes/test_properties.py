"""What holds for every graph: the passes preserve meaning, never add work, and are done when they are done."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from meaning import cost, gap, outputs_of
from random_graphs import Case, cases, graphs
from tolerances import EXACT_F64, MOVES

from cmrc.ir.evaluate import evaluate
from cmrc.ir.graph import Graph, Tensor
from cmrc.ir.tensors import materialise
from cmrc.ir.text import parse, to_text
from cmrc.ir.verify import verify_graph
from cmrc.passes.pipeline import PIPELINE, run
from cmrc.passes.rewriting.rewriter import Log

MANY = settings(max_examples=4 * settings.default.max_examples)
SCALE = 1e6  # graphs whose values grow beyond this say nothing about the passes


def reference(case: Case) -> list[np.ndarray]:
    """The outputs before any pass; graphs that blow up, or whose windows outgrow a size known only at run time, are thrown away."""
    try:
        with np.errstate(all="ignore"):
            values = evaluate(case.graph, case.inputs)
    except ValueError as error:
        assume("window shape" not in str(error))
        raise
    assume(all(np.isfinite(v).all() and np.abs(v).max(initial=0) < SCALE for v in values.values()))
    return [values[name] for name in case.graph.outputs]


@pytest.mark.parametrize("name", [rewrite.name for rewrite in PIPELINE])
def test_each_pass_alone_preserves_meaning(name: str) -> None:
    rewrite = next(rewrite.run for rewrite in PIPELINE if rewrite.name == name)

    @MANY
    @given(cases())
    def check(case: Case) -> None:
        expected = reference(case)
        before = to_text(case.graph)
        changed, _ = rewrite(case.graph, Log())
        verify_graph(changed)
        assert to_text(case.graph) == before, "the pass changed the graph that it was given"
        assert gap(outputs_of(changed, case.inputs), expected) <= EXACT_F64

    check()


def test_the_pipeline_preserves_meaning() -> None:
    moved: list[bool] = []

    @MANY
    @given(cases(most_steps=12, most_dos=4))
    def check(case: Case) -> None:
        expected = reference(case)
        moved.append(gap(outputs_of(case.plain, case.inputs), expected) > MOVES * EXACT_F64)
        states: list[Graph] = []
        run(case.graph, watch=lambda _, graph: states.append(graph))
        for graph in states:  # any prefix of the pipeline is a correct program
            assert gap(outputs_of(graph, case.inputs), expected) <= EXACT_F64

    check()
    assert sum(moved) > 0.6 * len(moved), "too few of the drawn replacements move the output to test anything"


@MANY
@given(cases())
def test_cost_never_grows(case: Case) -> None:
    reference(case)
    result = run(case.graph)
    # The one exception, which the report names: constants known only at run time that were computed and then found no taker.
    assume(not any(left.node.op == "do" and isinstance(left.node.inputs[1], str) for left in result.residue))
    before, after = cost(case.graph, case.inputs), cost(result.graph, case.inputs)
    assert after.parameters <= before.parameters
    assert after.macs <= before.macs


@MANY
@given(cases())
def test_a_second_run_changes_nothing(case: Case) -> None:
    reference(case)
    once = run(case.graph).graph
    for rewrite in PIPELINE:
        again, changed = rewrite.run(once, Log())
        assert to_text(again) == to_text(once), rewrite.name
        assert not changed, rewrite.name
    assert to_text(run(once).graph) == to_text(once)


@given(cases())
def test_folded_tensors_are_what_they_say(case: Case) -> None:
    """A host allots the declared shape and dtype before it computes a folded parameter."""
    reference(case)
    for node in run(case.graph).graph.nodes:
        for operand in node.inputs:
            if isinstance(operand, Tensor):
                array = materialise(operand)
                assert (array.shape, array.dtype.name) == (operand.shape, operand.dtype)


@given(cases(), st.booleans())
def test_text_round_trip(case: Case, lowered: bool) -> None:
    reference(case)
    graph = run(case.graph).graph if lowered else case.graph
    text = to_text(graph)
    again = parse(text, leaves=graph.leaves())
    assert again == graph
    assert to_text(again) == text


@given(graphs())
def test_a_graph_without_replacements_is_left_alone(graph: Graph) -> None:
    result = run(graph)
    assert to_text(result.graph) == to_text(graph)
    assert not result.actions
    assert not result.residue
