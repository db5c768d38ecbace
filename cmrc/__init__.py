"""cmrc, the causal mechanism reduction compiler.

program = cmrc.trace("model.onnx")                       # or (nn.Module, example inputs), or an ExportedProgram
plan = cmrc.Plan(program)
plan.do("blocks.3.mlp.act", units=[1, 5, 9], constant=means)
lowered = cmrc.lower(program, plan)                      # smaller, dense, equal to the clamped model
lowered.check((batch,)); lowered.save("small.onnx"); print(lowered.report)
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from cmrc._version import __version__
from cmrc.errors import CmrcError

if TYPE_CHECKING:
    from cmrc.hosts.onnx.bench import bench
    from cmrc.planning import diagnose
    from cmrc.planning.planner import plan
    from cmrc.planning.recipe import Recipe
    from cmrc.planning.spilled import calibrate_by_pieces
    from cmrc.program.check import Check
    from cmrc.program.groups import Group
    from cmrc.program.lower import Lowered, Recovery, lower
    from cmrc.program.plan import Affine, Plan
    from cmrc.program.program import Program, trace
    from cmrc.program.report import Report
    from cmrc.program.sites import Site
    from cmrc.recovery.recover import recover
    from cmrc.reduction.reducer import reduce
    from cmrc.reduction.result import Reduction
    from cmrc.statistics.calibrate import calibrate
    from cmrc.statistics.stats import Stats
    from cmrc.verification.interpreter import Interpreter, interpret
    from cmrc.verification.interventions import Patch, Swap
    from cmrc.verification.protocol import better, smallest_certified, verify
    from cmrc.verification.result import Verification
    from cmrc.verification.verifier import Verifier

__all__ = [
    "Affine",
    "Check",
    "CmrcError",
    "Group",
    "Interpreter",
    "Lowered",
    "Patch",
    "Plan",
    "Program",
    "Recipe",
    "Recovery",
    "Reduction",
    "Report",
    "Site",
    "Stats",
    "Swap",
    "Verification",
    "Verifier",
    "__version__",
    "bench",
    "better",
    "calibrate",
    "calibrate_by_pieces",
    "diagnose",
    "interpret",
    "lower",
    "plan",
    "recover",
    "reduce",
    "smallest_certified",
    "trace",
    "verify",
]

# Names are imported when they are first used: `import cmrc` costs nothing, and who lowers a model loads no planner.
_HOMES = {
    "Affine": "cmrc.program.plan:Affine",
    "Check": "cmrc.program.check:Check",
    "Group": "cmrc.program.groups:Group",
    "Interpreter": "cmrc.verification.interpreter:Interpreter",
    "Lowered": "cmrc.program.lower:Lowered",
    "Patch": "cmrc.verification.interventions:Patch",
    "Plan": "cmrc.program.plan:Plan",
    "Program": "cmrc.program.program:Program",
    "Recipe": "cmrc.planning.recipe:Recipe",
    "Recovery": "cmrc.program.lower:Recovery",
    "Reduction": "cmrc.reduction.result:Reduction",
    "Report": "cmrc.program.report:Report",
    "Site": "cmrc.program.sites:Site",
    "Stats": "cmrc.statistics.stats:Stats",
    "Swap": "cmrc.verification.interventions:Swap",
    "Verification": "cmrc.verification.result:Verification",
    "Verifier": "cmrc.verification.verifier:Verifier",
    "better": "cmrc.verification.protocol:better",
    "bench": "cmrc.hosts.onnx.bench:bench",
    "calibrate": "cmrc.statistics.calibrate:calibrate",
    "calibrate_by_pieces": "cmrc.planning.spilled:calibrate_by_pieces",
    "diagnose": "cmrc.planning.diagnose",
    "interpret": "cmrc.verification.interpreter:interpret",
    "lower": "cmrc.program.lower:lower",
    "plan": "cmrc.planning.planner:plan",
    "recover": "cmrc.recovery.recover:recover",
    "reduce": "cmrc.reduction.reducer:reduce",
    "smallest_certified": "cmrc.verification.protocol:smallest_certified",
    "trace": "cmrc.program.program:trace",
    "verify": "cmrc.verification.protocol:verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = resolve_name(_HOMES[name])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
