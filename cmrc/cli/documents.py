"""What every command prints with `--json`, as types: `cmrc schema COMMAND` prints them as JSON schemas.

The contract: a field that is listed here keeps its meaning and type. Documents may gain fields, so readers should
ignore fields that they do not know. Errors are documents too, for every command.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Document(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorPartsDocument(Document):
    """What went wrong, where, why, and how to fix it."""

    kind: str
    node: str
    op: str
    reason: str
    at: str
    fix: str


class ErrorDocument(Document):
    """Printed instead of the command's document when it fails; the exit code is 1 or 2."""

    error: ErrorPartsDocument


class CostDocument(Document):
    parameters: int
    bytes: int
    macs: int


class TensorDocument(Document):
    name: str
    dtype: str
    shape: list[int | str] = Field(description="a name means a dynamic size")


class SiteDocument(Document):
    name: str
    value: str
    op: str
    axis: int
    units: int
    shape: list[int | str]
    consumers: list[str]
    folds: str = Field(description="how a replaced unit folds, or what stops it; empty with --no-folds")


class InspectDocument(Document):
    """`cmrc inspect`"""

    model: str
    digest: str = Field(description="the fingerprint of graph and weights")
    inputs: list[TensorDocument]
    outputs: list[TensorDocument]
    cost: CostDocument
    foldable: int
    sites: list[SiteDocument]


class CalibrateDocument(Document):
    """`cmrc calibrate`"""

    output: str
    samples: int
    data: str = Field(description="the digest of the data")
    sites: dict[str, dict[str, Any]]


class PlanMakeDocument(Document):
    """`cmrc plan`"""

    output: str
    recipe: dict[str, Any]
    data: str
    samples: int
    sites: dict[str, dict[str, Any]]


class DoDocument(Document):
    do: int
    site: str
    value: str
    axis: int
    units: str = Field(description="ranges: 0:4,7")
    count: int
    becomes: str = Field(description="constant or affine")
    smallest: float
    largest: float


class PlanShowDocument(Document):
    """`cmrc plan show`"""

    plan: str
    model: str | None = Field(description="the fingerprint of the model that the plan is for")
    origin: dict[str, Any] = Field(alias="made", description="how it was made")
    do: list[DoDocument]


class FindingDocument(Document):
    site: str
    what: str = Field(
        description="coupling, predictions, kinks, sensitivity; or curvature, if the curvature is not known"
    )
    value: float | None
    good: bool | None
    advice: str
    points: list[list[float]] = Field(description="predictions: predicted, measured; sensitivity: samples, overlap")


class DiagnoseDocument(Document):
    """`cmrc diagnose`"""

    model: str
    findings: list[FindingDocument]


class DifferenceDocument(Document):
    site: str
    both: int
    jaccard: float


class PlanDiffDocument(Document):
    """`cmrc plan diff`"""

    same: bool
    sites: list[DifferenceDocument]


class FilesDocument(Document):
    before: int
    after: int


class LowerReportDocument(Document):
    before: CostDocument
    after: CostDocument
    files: FilesDocument | None = Field(
        None, description="bytes of the two files; null if the model came from no single file"
    )


class LowerDocument(Document):
    """`cmrc lower`"""

    output: str
    report: LowerReportDocument


class AnnotateDocument(Document):
    """`cmrc annotate`"""

    output: str


class CheckDocument(Document):
    """`cmrc check`"""

    holds: bool
    error: float = Field(description="relative to the largest number of the output")
    tolerance: float
    rounding: float = Field(
        description="how far the clamped model's outputs move when its inputs change by their last bit"
    )
    moved: float = Field(description="how far the replacement itself moves the outputs")
    batches: int
    agreement: float | None = Field(description="the share of answers with the top class of the original")
    answers: int
    random: bool = Field(description="whether the inputs were drawn at random")


class VerifiedDocument(Document):
    verdict: str
    about: str
    inputs: int
    swaps: int
    agreement: Any = Field(description="value, low, high")
    accuracy: dict[str, Any] | None
    decision: dict[str, Any] | None


class VerifyDocument(Document):
    """`cmrc verify`"""

    model: str
    plans: dict[str, VerifiedDocument]


class LinkDocument(Document):
    recorded: str
    actual: str
    holds: bool


class ProvenanceDocument(Document):
    """`cmrc provenance`"""

    file: str
    recorded: dict[str, str]
    holds: bool | None = None
    links: dict[str, LinkDocument] = {}


class BenchFileDocument(Document):
    file: str
    seconds: float
    low: float
    high: float
    bytes: int
    providers: list[str] = Field(description="the execution provider that was really used")


class BenchDocument(Document):
    """`cmrc bench`"""

    batch: int
    threads: int
    files: list[BenchFileDocument]


class GoalDocument(Document):
    goal: str
    met: bool
    value: str


class SizeDocument(Document):
    share: float
    parameters: int
    macs: int
    bytes: int
    quality: dict[str, Any]
    speed: dict[str, Any] | None


class ReduceDocument(Document):
    """`cmrc reduce`"""

    output: str
    plan: str
    cmrc: str
    ready: bool
    verdict: str
    problems: list[str]
    goals: list[GoalDocument]
    original: dict[str, float | None]
    chosen: float
    frontier: list[SizeDocument]
    check: dict[str, Any]
    data: dict[str, Any]
    recipe: dict[str, Any]


class RecoverDocument(Document):
    """`cmrc recover`"""

    output: str
    recovery: dict[str, Any]


class ReportDocument(Document):
    """`cmrc report`"""

    output: list[str] = Field(description="the page, and the same as Markdown and JSON")


class CompareDocument(Document):
    """`cmrc compare`"""

    names: list[str]
    same_model: bool
    verdict: str
    chosen: list[Any]
    widths: Any


class AssumeDocument(Document):
    """`cmrc assume`"""

    output: str


DOCUMENTS: dict[str, type[BaseModel]] = {
    "reduce": ReduceDocument,
    "inspect": InspectDocument,
    "calibrate": CalibrateDocument,
    "plan": PlanMakeDocument,
    "plan show": PlanShowDocument,
    "plan diff": PlanDiffDocument,
    "diagnose": DiagnoseDocument,
    "lower": LowerDocument,
    "check": CheckDocument,
    "verify": VerifyDocument,
    "provenance": ProvenanceDocument,
    "bench": BenchDocument,
    "annotate": AnnotateDocument,
    "recover": RecoverDocument,
    "report": ReportDocument,
    "compare": CompareDocument,
    "assume": AssumeDocument,
    "error": ErrorDocument,
}
