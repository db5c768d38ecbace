"""What becomes of a node that something arrives at: the outcome of a rule, and the record of a whole pipeline.

A rule is `(walk, node, arriving) -> Rewritten | Declined`. `walk` is a sweep down or up the graph; `arriving` is what has come as
far as this node: constants, an affine relation, or a selection. A rule decides first and emits afterwards, so that one which
declines has changed nothing. An op without a rule stops everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from cmrc.ir.graph import Node


class Movement(Enum):
    """What a rule did with what arrived."""

    PAST = "it went on behind the node"
    UNREAD = "nothing of it is read here"
    JOINED = "it became one with the next do"
    FOLDED = "it became part of a parameter or an added number"
    TAKEN = "the node took it in, and nothing had to be added"
    NARROWED = "the node makes fewer units"
    COPIES = "the node only copies what is left: its readers read its operand"
    DROPPED = "nobody reads the node"


@dataclass(frozen=True, slots=True)
class Declined:
    """The rule understands the op and cannot pass it, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The rule rewrote the node. `detail` is for people; a rising rule hands over the `node` that takes its place."""

    movement: Movement
    detail: str = ""
    node: Node | None = None


RuleOutcome = Rewritten | Declined

PAST = Rewritten(Movement.PAST, "past")
UNREAD = Rewritten(Movement.UNREAD, "past, none of the units is read here")
JOINED = Rewritten(Movement.JOINED, "joined with the next do")
DROPPED = Rewritten(Movement.DROPPED, "dropped, nobody reads it")
NOTHING_TO_ADD = Rewritten(Movement.TAKEN, "nothing to add, the constants are 0")


def past(detail: str) -> Rewritten:
    return Rewritten(Movement.PAST, f"past, {detail}")


def folded(detail: str) -> Rewritten:
    return Rewritten(Movement.FOLDED, detail)


def taken(detail: str) -> Rewritten:
    return Rewritten(Movement.TAKEN, detail)


@dataclass(frozen=True, slots=True)
class Action:
    """One movement that happened: which pass, at which node, for which of the plan's entries."""

    rule: str
    at: Node
    movement: Movement
    detail: str
    sources: tuple[int, ...] = ()

    @property
    def ends_here(self) -> bool:
        """Whether the node took the replacement in, as opposed to passing it on."""
        return self.movement in (Movement.FOLDED, Movement.TAKEN)

    @property
    def node(self) -> str:
        return self.at.label

    @property
    def op(self) -> str:
        return self.at.kind


@dataclass(slots=True)
class Log:
    """What a pipeline did, and why what stopped stopped: reasons by (value, reader)."""

    actions: list[Action] = field(default_factory=list)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    # Nodes that nobody needed before the first pass: they are the host's own, and stay with what they read.
    idle: frozenset[str] | None = None

    def did(self, rule: str, node: Node, outcome: Rewritten, sources: Sequence[int] = ()) -> None:
        self.actions.append(Action(rule, node, outcome.movement, outcome.detail, tuple(sources)))
