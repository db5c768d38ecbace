"""Constants that meet another replacement."""

from __future__ import annotations

from graphs import Do
from rewrites.start import TWO, Example, done, vector

from cmrc.ir.graph import Graph


def do() -> Graph:
    net, h = vector()
    net.linear(h, 2)
    return done(net, Do(h, 1, (2, 0), *TWO), Do(h, 1, (0, 1), [0.25, 0.75]))


def do_before_an_affine_one() -> Graph:
    net, h = vector()
    net.linear(h, 2)
    return done(net, Do(h, 1, (0,), [0.5]), Do(h, 1, (2,), [0.1], (1, 3), [[0.5, -1.0]]))


def do_of_parents() -> Graph:
    """A parent of the affine do is constant: it joins the bias. Where all are, the do is constant."""
    net, h = vector()
    net.linear(h, 2)
    return done(
        net, Do(h, 1, (1,), [0.5]), Do(h, 1, (2,), [0.1], (1, 3), [[0.5, -1.0]]), Do(h, 1, (0,), 0.0, (1,), [[2.0]])
    )


DO: dict[str, Example] = {
    "do": do,
    "do-before-an-affine-one": do_before_an_affine_one,
    "do-of-parents": do_of_parents,
}
