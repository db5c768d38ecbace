"""cmrc, the causal mechanism reduction compiler.

program = cmrc.trace("model.onnx")                       # or (nn.Module, example inputs), or an ExportedProgram
plan = cmrc.Plan(program)
plan.do("blocks.3.mlp.act", units=[1, 5, 9], constant=means)
lowered = cmrc.lower(program, plan)                      # smaller, dense, equal to the clamped model
lowered.check((batch,)); lowered.save("small.onnx"); print(lowered.report)
"""

from __future__ import annotations

__version__ = "0.1.0"

from cmrc.calibrate import calibrate
from cmrc.errors import CmrcError
from cmrc.groups import Group
from cmrc.interpret import Interpreter, interpret
from cmrc.interventions import Patch, Swap
from cmrc.lower import Check, Lowered, lower
from cmrc.plan import Affine, Plan
from cmrc.planning import plan
from cmrc.program import Program, Site, trace
from cmrc.recipe import Recipe
from cmrc.report import Report
from cmrc.stats import Stats
from cmrc.verification import Verification
from cmrc.verify import Verifier, smallest_certified, verify

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
    "calibrate",
    "interpret",
    "lower",
    "plan",
    "smallest_certified",
    "trace",
    "verify",
]
