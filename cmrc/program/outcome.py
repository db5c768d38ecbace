"""What a dry run says about a replaced unit: it folds, it stops at a node, or there is no second unit to keep.

Code decides on `Ending`; people read the text beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """How the dry run of one replacement ends."""

    FOLDS = "folds"
    STOPS = "stops"
    SINGLE_UNIT = "has a single unit"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The ending of one dry run: the nodes that take the replacement in, or the node that stops it and why."""

    ending: Ending
    into: tuple[str, ...] = ()
    node: str = ""
    op: str = ""
    reason: str = ""

    @property
    def folds(self) -> bool:
        return self.ending is Ending.FOLDS

    def __str__(self) -> str:
        if self.ending is Ending.FOLDS:
            return f"folds into {', '.join(self.into)}" if self.into else "folds"
        if self.ending is Ending.STOPS:
            place = f" at {self.node} ({self.op})" if self.node else ""
            return f"stops{place}: {self.reason}"
        return str(self.ending.value)


@dataclass(frozen=True, slots=True)
class SiteFolding:
    """What becomes of a unit of a site, replaced by a constant and by an affine function of another unit."""

    constant: Outcome
    affine: Outcome

    @property
    def folds(self) -> bool:
        """Whether both kinds of replacement fold."""
        return self.constant.folds and self.affine.folds

    def __str__(self) -> str:
        constant, affine = str(self.constant), str(self.affine)
        return constant if constant == affine else f"constant {constant}; affine {affine}"


@dataclass(frozen=True, slots=True)
class GroupFolding:
    """What becomes of a unit of a group, replaced by a constant and by 0, which more nodes let pass."""

    constant: Outcome
    zero: Outcome

    def __str__(self) -> str:
        if self.constant.folds:
            return str(Ending.FOLDS.value)
        return f"folds if it becomes 0; otherwise it {self.constant}" if self.zero.folds else str(self.constant)
