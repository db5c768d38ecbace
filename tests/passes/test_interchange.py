"""The cut: which piece makes what, and what is live across."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cmrc.ir.text import parse, to_text
from cmrc.ir.verify import verify_graph
from cmrc.passes.interchange import cut

SOURCE = """
graph(%x: float32[N,4]) -> (%y, %side)
%n = opaque(%x) {| host_op='Shape', shape_only=(0,)} : int64[1]
%ones = opaque(%n) {| host_op='Ones'} : float32[N,4]
%h = linear(%x, @w1: float32[4,4]) {axis=1, w_in=1, w_out=0} : float32[N,4]
%a = pointwise(%h) {fn='relu'} : float32[N,4]
%side = pointwise(%h) {fn='tanh'} : float32[N,4]
%b = linear(%a, @w2: float32[4,4]) {axis=1, w_in=1, w_out=0} : float32[N,4]
%c = pointwise(%b, %ones) {fn='add'} : float32[N,4]
%d = pointwise(%c) {fn='relu'} : float32[N,4]
%y = pointwise(%d, %h, %ones) {fn='add'} : float32[N,4]
"""


def screen(*sites: str) -> str:
    pieces = cut(parse(SOURCE), sites)
    return "\n".join(f"; piece {i}\n{to_text(piece)}" for i, piece in enumerate(pieces.pieces)) + "\n"


@pytest.mark.parametrize("sites", [("a",), ("a", "d"), ("a", "side"), ("x",), ()], ids="-".join)
def test_pieces(sites: tuple[str, ...], golden: Callable[[str, str], None]) -> None:
    golden(f"interchange/{'-'.join(sites) or 'nowhere'}", screen(*sites))


@pytest.mark.parametrize("sites", [("a",), ("a", "d"), ("b", "side"), ("x", "c")])
def test_pieces_hold_together(sites: tuple[str, ...]) -> None:
    """Each is a graph in itself; what it reads was made before; work on the inputs' numbers is done once."""
    graph = parse(SOURCE)
    pieces = cut(graph, sites)
    known = {value.name for value in graph.inputs}
    done: list[str] = []
    for piece in pieces.pieces:
        verify_graph(piece)
        assert {value.name for value in piece.inputs} <= known
        known |= set(piece.outputs)
        done += [node.name for node in piece.nodes if node.name not in pieces.free]
    assert sorted(done) == sorted(node.name for node in graph.nodes if node.name not in pieces.free)
    assert set(graph.outputs) <= known
    assert pieces.free == {"n", "ones"}


def test_levels_count_the_sites_on_the_way() -> None:
    assert cut(parse(SOURCE), ["d", "a", "side"]).levels == {"d": 1, "a": 0, "side": 0}


def test_a_site_that_reaches_no_output_is_told() -> None:
    text = SOURCE.replace("(%y, %side)", "(%y)")
    assert cut(parse(text), ["side", "a"]).dead == ("side",)
