"""cmrc, the causal mechanism reduction compiler.

program = cmrc.trace("model.onnx")                       # or (nn.Module, example inputs), or an ExportedProgram
plan = cmrc.Plan(program)
plan.do("blocks.3.mlp.act", units=[1, 5, 9], constant=means)
lowered = cmrc.lower(program, plan)                      # smaller, dense, equal to the clamped model
lowered.check((batch,)); lowered.save("small.onnx"); print(lowered.report)
"""

from __future__ import annotations

from cmrc._version import __version__
from cmrc.errors import CmrcError
from cmrc.planning.planner import plan
from cmrc.planning.recipe import Recipe
from cmrc.program.groups import Group
from cmrc.program.lower import Check, Lowered, lower
from cmrc.program.plan import Affine, Plan
from cmrc.program.program import Program, Site, trace
from cmrc.program.report import Report
from cmrc.statistics.calibrate import calibrate
from cmrc.statistics.stats import Stats
from cmrc.verification.interpreter import Interpreter, interpret
from cmrc.verification.interventions import Patch, Swap
from cmrc.verification.result import Verification
from cmrc.verification.verifier import Verifier, smallest_certified, verify

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
    "Report",
    "Site",
    "Stats",
    "Swap",
    "Verification",
    "Verifier",
    "__version__",
    "calibrate",
    "interpret",
    "lower",
    "plan",
    "smallest_certified",
    "trace",
    "verify",
]
