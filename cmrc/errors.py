"""Every error that a user can meet, one class per kind: what, where, why, and the way out.

do-shape: %blocks.3.mlp.act (gelu): the plan gives 3 constants for 384 units
  at plan.json: do[2]
  fix: give one constant per replaced unit, or one for all

A fix speaks Python, and spells a keyword as `name=value`: the command line turns that into its flag (cmrc/cli/wording.py).
"""

from __future__ import annotations


def message(kind: str, reason: str, *, node: str, op: str, at: str, fix: str) -> str:
    """The whole text of an error, as above."""
    where = f" %{node}" if node else ""
    if node and op:
        where += f" ({op})"
    lines = [f"{kind}:{where}{':' if where else ''} {reason}"]
    if at:
        lines.append(f"  at {at}")
    if fix:
        lines.append(f"  fix: {fix}")
    return "\n".join(lines)


class CmrcError(Exception):
    """The parent of all: `kind: %node (op): reason`, the plan's entry, the fix."""

    kind = "error"

    def __init__(self, reason: str, *, node: str = "", op: str = "", at: str = "", fix: str = "") -> None:
        self.reason, self.node, self.op, self.at, self.fix = reason, node, op, at, fix
        super().__init__(message(self.kind, reason, node=node, op=op, at=at, fix=fix))


class GraphError(CmrcError):
    """The IR itself does not hold together: a bug in a host or a pass, never in a user's plan."""

    kind = "graph"

    def __init__(self, node: str, op: str, reason: str) -> None:
        super().__init__(
            reason,
            node=node,
            op=op,
            fix="this is a fault of cmrc: please report it, with the IR that `cmrc inspect` can print",
        )


class TextError(CmrcError):
    """A text form of the IR that cannot be parsed."""

    kind = "ir-text"


class TraceError(CmrcError):
    """The model cannot be read."""

    kind = "trace"


class SiteError(CmrcError):
    """A name that is no site, or more than one."""

    kind = "site"


class DoError(CmrcError):
    """A replacement that makes no sense where it stands."""

    kind = "do"


class DoShapeError(DoError):
    """Arrays that do not fit the units."""

    kind = "do-shape"


class DoUnitsError(DoError):
    """Units out of range, repeated, replaced twice, or parents that are themselves replaced."""

    kind = "do-units"


class DoValueError(DoError):
    """Numbers that are NaN or infinite, or become so in the precision of the model."""

    kind = "do-value"


class StatsError(CmrcError):
    """Statistics that lack something, or do not belong together; data that cannot be calibrated on."""

    kind = "stats"


class ObjectiveError(CmrcError):
    """An objective, replacement or selection that is unknown, or makes no sense at a site."""

    kind = "objective"


class RecipeError(CmrcError):
    """A recipe that does not follow the schema."""

    kind = "recipe"


class OutOfReachError(RecipeError):
    """A budget below what is left with everything gone that may go: `least` is that, as a part of the whole."""

    def __init__(self, reason: str, *, least: float, fix: str = "") -> None:
        self.least = least
        super().__init__(reason, fix=fix)


class PlanError(CmrcError):
    """A plan file that cannot be read."""

    kind = "plan"


class FingerprintError(CmrcError):
    """A plan for another model."""

    kind = "fingerprint"


class ResidueError(CmrcError):
    """Replacements that could not be folded away, while the caller asked for a clean result."""

    kind = "residue"


class GrowthError(CmrcError):
    """A result that would hold more numbers than the model, while the caller did not allow it."""

    kind = "growth"


class HostError(CmrcError):
    """Something that this host cannot do."""

    kind = "host"


class InputError(CmrcError):
    """Inputs that cannot be made, or that a model does not take."""

    kind = "input"


class FileError(CmrcError):
    """A file that cannot be written."""

    kind = "file"


class CheckError(CmrcError):
    """Lowered and clamped do not agree, or could not be compared."""

    kind = "check"


class InterventionError(CmrcError):
    """An intervention that does not fit: rows, masks, or values of the wrong shape."""

    kind = "intervention"


class VerifyError(CmrcError):
    """A verification that has no meaning as asked: data, sites or outputs that do not fit."""

    kind = "verify"


class CertifyError(CmrcError):
    """A target that cannot be understood, or that no candidate meets."""

    kind = "certify"


def causes(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and so on to the first."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain


def last_line(error: BaseException) -> str:
    """The innermost cause of an error, in a line."""
    first = causes(error)[-1]
    lines = str(first).strip().splitlines()
    return lines[-1] if lines else type(first).__name__
