"""Constants that meet attention or a product of two values: every reason to stop (the rewrites are among constant_fold's)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import Do
from rewrites.start import TWO, attend, done, sequence, three_heads
from rules import RISING, reasons, untested

from cmrc.ir.graph import Graph, Operand, literal
from cmrc.passes import constant_fold
from cmrc.passes.rewriting import contract


def attention(replaced: Callable[[str, str, str], Do], *mask: Operand, **attrs: object) -> Callable[[], Graph]:
    """Attention with one of its operands replaced."""

    def build() -> Graph:
        net, _ = sequence()
        q, k, v = three_heads(net)
        attend(net, q, k, v, *mask, **attrs)
        return done(net, replaced(q, k, v))

    return build


def replaced_mask() -> Graph:
    net, _ = sequence()
    mask = net.linear("x", 3)
    attend(net, *three_heads(net), net.reshape(mask, "N", 1, 3, 3))
    return done(net, Do("reshape_4", 3, (1,), [0.5]))


def mask_of_run_time() -> Graph:
    net, _ = sequence()
    q, k, v = three_heads(net)
    attend(net, q, k, v, net.reshape(net.linear("x", 3), "N", 1, 3, 3))
    return done(net, Do(v, 3, (2, 0), *TWO))


def product(replaced: Callable[[str, str], Do | tuple[Do, ...]]) -> Callable[[], Graph]:
    def build() -> Graph:
        net, _ = sequence()
        q, k, _ = three_heads(net)
        turned = net.transpose(k, 0, 1, 3, 2)
        net.matmul(q, turned)
        dos = replaced(q, turned)
        return done(net, *(dos if isinstance(dos, tuple) else (dos,)))

    return build


def operand_of_dynamic_size() -> Graph:
    net, h = sequence()
    net.node("matmul", (h, net.input("N", "M", 5, name="y")), ("N", 3, 5))
    return done(net, Do(h, 2, (1,), 0.0))


def vector_operand() -> Graph:
    net, h = sequence()
    row = net.along("mean", h, (0, 1), drop=True)
    net.node("matmul", (row, net.transpose(h, 0, 2, 1)), ("N", 3))
    return done(net, Do(row, 0, (1,), 0.0))


def broadcast_heads() -> Graph:
    net, _ = sequence()
    q, k, _ = three_heads(net, shared=1)
    turned = net.transpose(k, 0, 1, 3, 2)
    net.matmul(q, turned)
    return done(net, Do(turned, 1, (0,), 0.0))


def softmax_by_position() -> Graph:
    net, _ = sequence()
    q, k, v = three_heads(net)
    net.matmul(net.along("softmax", net.matmul(q, net.transpose(k, 0, 1, 3, 2)), (3,)), v)
    return done(net, Do(v, 3, (1,), np.arange(3.0).reshape(1, 1, 3, 1)))


def softmax_over_queries() -> Graph:
    """Its columns sum to 1, not its rows."""
    net, _ = sequence()
    q, k, v = three_heads(net)
    net.matmul(net.along("softmax", net.matmul(q, net.transpose(k, 0, 1, 3, 2)), (2,)), v)
    return done(net, Do(v, 3, (1,), [0.5]))


HIDDEN = literal([[1, 0, 0], [0, 0, 0], [0, 1, 1]], "bool")
BY_POSITION = np.arange(3.0).reshape(1, 1, 3, 1)
DECLINES: list[tuple[str, Callable[[], Graph], str]] = [
    ("mask", replaced_mask, "its mask is replaced"),
    ("square", attention(lambda q, k, v: Do(q, 3, (1,), 0.0), square=True), "its values have the size of its queries"),
    ("keys of a head", attention(lambda q, k, v: Do(k, 1, (1,), [0.5])), "queries or keys are replaced along an axis that is not their units'"),
    ("query constant", attention(lambda q, k, v: Do(q, 3, (2, 0), [0.0, 0.5])), "a query unit that is constant, and not 0, still affects the weights of the keys"),
    ("keys by position", attention(lambda q, k, v: Do(k, 3, (1,), BY_POSITION)), "a key unit that differs by position still affects the weights of the keys"),
    ("all keys", attention(lambda q, k, v: Do(k, 3, (0, 1, 2), [0.5, 1.0, 2.0])), "no unit would be left to compare queries with keys"),
    ("values of positions", attention(lambda q, k, v: Do(v, 2, (1,), [0.5])), "it mixes positions along the replaced axis"),
    ("values by position", attention(lambda q, k, v: Do(v, 3, (1,), BY_POSITION)), "the constants differ by position, and attention mixes positions"),
    ("mask known only at run time", mask_of_run_time, "its mask may hide every key from a query, and then the result is not the constant"),
    ("hidden row", attention(lambda q, k, v: Do(v, 3, (1,), [0.5]), HIDDEN), "its mask may hide every key from a query, and then the result is not the constant"),
    ("mask and causal", attention(lambda q, k, v: Do(v, 3, (1,), [0.5]), literal(np.ones((3, 3)), "bool"), causal=True), "its mask may hide every key from a query, and then the result is not the constant"),
    ("vector", vector_operand, "one of its operands is a vector"),
    ("both", product(lambda q, k: (Do(q, 1, (0,), 0.0), Do(k, 1, (1,), 0.0))), "both of its operands are replaced"),
    ("broadcast", broadcast_heads, "the replaced axis is broadcast here"),
    ("left rows", product(lambda q, k: Do(q, 2, (1,), [0.5])), "it adds up constants with weights known only at run time"),
    ("right columns", product(lambda q, k: Do(k, 3, (1,), [0.5])), "it adds up constants with weights known only at run time"),
    ("softmax over queries", softmax_over_queries, "it adds up constants with weights known only at run time"),
    ("softmax by position", softmax_by_position, "the constants differ by position, and the product mixes positions"),
    ("contracted", product(lambda q, k: Do(q, 3, (1,), [0.5])), "it contracts constants with values known only at run time"),
    ("dynamic size", operand_of_dynamic_size, "the other operand has a dynamic size along the contracted axis"),
    ("contracted, all", product(lambda q, k: Do(q, 3, (0, 1, 2), 0.0)), "no unit would be left to contract"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "reason"), [case[1:] for case in DECLINES], ids=[case[0] for case in DECLINES])
def test_stops(build: Callable[[], Graph], reason: str) -> None:
    assert reasons(constant_fold.run, build()) == {reason}


def test_every_reason_is_tested() -> None:
    assert untested(contract, {reason for _, _, reason in DECLINES} | RISING) == []


def test_a_zero_passes_where_a_mask_may_hide_everything() -> None:
    net, _ = sequence()
    q, k, v = three_heads(net)
    attend(net, q, k, v, HIDDEN)
    after, changed = constant_fold.run(done(net, Do(v, 3, (1,), 0.0)), constant_fold.Log())
    assert changed
    assert "do" not in {node.op for node in after.nodes}
