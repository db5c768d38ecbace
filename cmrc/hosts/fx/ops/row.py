"""What a row of the table is, and how one is registered.

A row is a function from the node's arguments (by the names of the op's schema, defaults filled in) to a `Read`. `None`
means that this form of the op is opaque. `Barrier(why)` is opaque too, and tells the user why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from cmrc.hosts.fx.schema import Arguments
from cmrc.ir.graph import NO_MARKS, Marks, quickly_made

Position: TypeAlias = int | tuple[int, int]  # an argument, or an entry of an argument that is a list


@quickly_made
@dataclass(frozen=True, slots=True)
class Read:
    """What a node is in the IR. `args` are the places of its operands among the arguments."""

    op: str
    args: tuple[Position, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    marks: Marks = NO_MARKS
    parts: tuple[dict[str, Any], ...] | None = None  # for ops with several results: the attributes of each
    sizes: str = ""  # the argument that has the sizes of the result, written anew when these shrink
    first: int = 0  # the axis that the first of these sizes belongs to


@dataclass(frozen=True, slots=True)
class Barrier:
    """A form of the op that replacements cannot pass, and why. It may read its first operand by weights alone: these, and their biases."""

    why: str
    weighed: tuple[tuple[fx.Node, fx.Node | None], ...] = ()
    cells: tuple[tuple[fx.Node | None, ...], ...] = ()  # of a recurrent op, by direction: W, R, b_W and b_R
    states: tuple[fx.Node, ...] = ()  # and the initial states that it is given


Row: TypeAlias = Callable[[Arguments], Read | Barrier | None]
ROWS: dict[Any, Row] = {}


def row(*names: str) -> Callable[[Row], Row]:
    """Register a row for aten overloads by name; a name that this torch does not have is left out."""

    def register(function: Row) -> Row:
        for name in names:
            packet, _, overload = name.partition(".")
            target = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if target is not None:
                ROWS[target] = function
        return function

    return register


def along(fn: str, axes: Sequence[int], *args: Position, **attrs: Any) -> Read:
    return Read("along", (0, *args), {"fn": fn, "axes": tuple(axes), **attrs})


def integers(value: Any, rank: int) -> tuple[int, ...]:
    """One number per axis: torch takes a single one for all."""
    entries = list(value) if isinstance(value, (list, tuple)) else [value]
    return tuple(int(v) for v in (entries * rank if len(entries) == 1 else entries))
