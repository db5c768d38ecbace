"""`cmrc verify`: does a lowered model answer alike under interchange interventions?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Model, Quiet, Verbose, examples, new_app
from cmrc.cli.terminal import fail, reported
from cmrc.errors import CmrcError
from cmrc.files import require_picture
from cmrc.program.plan import Plan
from cmrc.program.trace import trace
from cmrc.verification.result import Verification, draw_plans
from cmrc.verification.verifier import verify

app = new_app()


@app.command(
    "verify",
    epilog=examples(
        "cmrc verify model.onnx small.onnx plan.json --data held-out.npz",
        "cmrc verify model.onnx small.onnx plan.json --data held-out.npz --until 'iia>=0.95'",
    ),
)
def verify_command(
    model: Model,
    reduced: Annotated[
        list[Path],
        typer.Argument(
            help="LOWERED PLAN, and more such pairs to compare. A '-' for LOWERED takes the plan literally."
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="Held-out data: a folder or file of .npy or .npz, `labels` beside inputs.")
    ],
    site: Annotated[list[str] | None, typer.Option(help="Swap at these sites only. All of the plan if absent.")] = None,
    swaps: Annotated[int, typer.Option(help="Interventions; with --until, at most.")] = 2000,
    p: Annotated[list[float] | None, typer.Option(help="How likely a unit is swapped; several take turns. 0.5")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the swaps.")] = 0,
    until: Annotated[
        str, typer.Option(help="Stop once it is decided: 'iia>=0.95'. Exit code 0 only if it holds.")
    ] = "",
    delta: Annotated[float, typer.Option(help="Certificates and the target may fail with this probability.")] = 0.05,
    controls: Annotated[bool, typer.Option(help="Also swap replaced units, and retain units at random.")] = True,
    output: Annotated[str | None, typer.Option(help="Which of several outputs to compare.")] = None,
    reads: Annotated[str | None, typer.Option(help="How: classes, binary or values.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="How far values of a regression may lie apart.")] = None,
    class_axis: Annotated[int, typer.Option(help="The axis of the classes.")] = -1,
    counted: Annotated[str | None, typer.Option(help="The array of the data that says which tokens count.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw IIA and KL of all plans against the units kept.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Verify lowered models under interchange interventions. Exit code 1 if the target of --until is not met."""
    with reported(as_json):
        if len(reduced) % 2:
            raise CmrcError(
                "every lowered model needs its plan", fix="cmrc verify MODEL LOWERED PLAN [LOWERED PLAN ...]"
            )
        if plot is not None:
            require_picture(plot)
        files = list(zip(reduced[::2], reduced[1::2], strict=True))
        plans = [file for _, file in files]
        names = [str(file) if plans.count(file) == 1 else f"{lowered} {file}" for lowered, file in files]
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise CmrcError(f"{twice[0]} is given twice", fix="give every lowered model with its plan once")
        program = trace(model)
        found: dict[str, Verification] = {}
        for name, (lowered, file) in zip(names, files, strict=True):
            plan = Plan.load(file)
            found[name] = verify(
                program, plan if str(lowered) == "-" else lowered, data, plan=plan, site=site or None, swaps=swaps,
                p=tuple(p) if p and len(p) > 1 else p[0] if p else 0.5, seed=seed, until=until or None, delta=delta,
                controls=controls, output=int(output) if output and output.isdigit() else output, reads=reads,
                tolerance=tolerance, class_axis=class_axis, counted=counted,
            )  # fmt: skip
        if plot is not None:
            draw_plans(found, plot)
        first, *others = found
        if as_json:
            documents = {name: result.to_json() for name, result in found.items()}
            print(json.dumps({"model": str(model), "plans": documents}, indent=1))
        else:
            for name, result in found.items():
                terminal.out.print(f"{name}\n{result}\n", markup=False)
            for name in [] if until else others:  # runs that stop by themselves are not of the same swaps
                terminal.out.print(f"{name} minus {first}: {found[name].minus(found[first])}", markup=False)
            if plot is not None:
                terminal.out.print(f"wrote {plot}", markup=False)
    if any(result.decision is not None and result.decision.holds is not True for result in found.values()):
        fail(1)
