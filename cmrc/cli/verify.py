"""`cmrc verify`: does a lowered model answer like the original under interchange interventions?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Model, Quiet, Verbose, examples, new_app
from cmrc.cli.terminal import fail, reported
from cmrc.errors import CmrcError
from cmrc.files import require_picture
from cmrc.program.plan import Plan
from cmrc.program.program import Program, trace
from cmrc.statistics import distributed
from cmrc.verification.protocol import better, verify
from cmrc.verification.result import Verification, draw_plans

app = new_app()


@app.command(
    "verify",
    epilog=examples(
        "cmrc verify model.onnx small.onnx plan.json --data held-out.npz",
        "cmrc verify model.onnx small.onnx plan.json --data held-out.npz --until 'iia>=0.95'",
        "cmrc verify model.onnx small.onnx plan.json --data held-out.npz --swaps 0",
        "cmrc verify model.onnx a.onnx a.json b.onnx b.json --data held-out.npz --better iia",
    ),
)
def verify_command(
    model: Model,
    reduced: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOWERED PLAN",
            help="A lowered model and its plan, and more such pairs to compare. A '-' for LOWERED uses the original with the plan's units clamped.",
        ),
    ],
    data: Annotated[
        Path,
        typer.Option(metavar="DATA", help="Held-out data: a folder or file of .npy or .npz, `labels` beside inputs."),
    ],
    site: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Swap at these sites only.", show_default="all sites of the plan"),
    ] = None,
    swaps: Annotated[
        int,
        typer.Option(
            metavar="NUMBER",
            help="Number of interventions; with --until, the largest number. 0 compares without swaps, which is fast.",
        ),
    ] = 2000,
    p: Annotated[
        list[float] | None,
        typer.Option(
            metavar="PART",
            help="The probability that a unit is swapped; several values take turns.",
            show_default="0.5",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Seed of the swaps.")] = 0,
    until: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            help="Stop once this target is decided: 'iia>=0.95', 'agreement>=0.99', 'accuracy>=0.9', 'drop<=0.01', 'kl<=0.1', "
            "'d2<=5'. Exit code 0 only if it holds.",
        ),
    ] = "",
    better_by: Annotated[
        str,
        typer.Option(
            "--better", metavar="iia|kl", help="Only decide which of two models is better, by iia or kl, and stop then."
        ),
    ] = "",
    about: Annotated[
        str,
        typer.Option(
            metavar="population|fixed",
            help="What the bounds cover: the population that the inputs come from, or these fixed inputs only.",
        ),
    ] = "population",
    distinct: Annotated[bool, typer.Option(help="With --about fixed: never pair an input with itself.")] = False,
    stress: Annotated[
        float | None,
        typer.Option(
            metavar="TIMES", help="Draw easy inputs this many times less often, and weight them by the same factor."
        ),
    ] = None,
    delta: Annotated[
        float, typer.Option(metavar="PART", help="The probability with which a certificate or the target may be wrong.")
    ] = 0.05,
    controls: Annotated[
        bool, typer.Option(help="Also show the scores of a model that ignores swaps and of a random plan.")
    ] = True,
    output: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which output to compare, if there are several.")
    ] = None,
    reads: Annotated[str | None, typer.Option(metavar="HOW", help="How to compare: classes, binary or values.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="How far values of a regression may differ and still agree.")
    ] = None,
    class_axis: Annotated[int, typer.Option(metavar="AXIS", help="The axis of the classes.")] = -1,
    counted: Annotated[
        str | None, typer.Option(metavar="NAME", help="The array in the data that marks which tokens count.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot IIA and KL of all plans against the number of units kept.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Verify lowered models under interchange interventions. Exit code 1 if the target of --until is not met.

    Under torchrun, each process runs its share of the swaps.
    """
    with reported(as_json), distributed.group():
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
        rates = tuple(p) if p and len(p) > 1 else p[0] if p else 0.5
        reading: dict[str, Any] = {
            "site": site or None, "output": int(output) if output and output.isdigit() else output, "reads": reads,
            "tolerance": tolerance, "class_axis": class_axis, "counted": counted,
        }  # fmt: skip
        if better_by:
            compare_two(program, files, data, by=better_by, p=rates, swaps=swaps, seed=seed, delta=delta,
                        as_json=as_json, reading=reading)  # fmt: skip
            return
        results: dict[str, Verification] = {}
        for name, (lowered, file) in zip(names, files, strict=True):
            plan = Plan.load(file)
            results[name] = verify(
                program, plan if str(lowered) == "-" else lowered, data, plan=plan, swaps=swaps, p=rates, seed=seed,
                until=until or None, delta=delta, about=about, distinct=distinct, stress=stress, controls=controls,
                watch=terminal.progress, spread=True, **reading,
            )  # fmt: skip
        if distributed.shard()[0]:  # only the first process prints
            return
        if plot is not None:
            draw_plans(results, plot)
        first, *others = results
        if as_json:
            documents = {name: result.to_json() for name, result in results.items()}
            print(json.dumps({"model": str(model), "plans": documents}, indent=1))
        else:
            for name, result in results.items():
                terminal.out.print(f"{name}\n{result}\n")
            for name in [] if until or not swaps else others:  # runs that stop early do not have the same swaps
                terminal.out.print(f"{name} minus {first}: {results[name].minus(results[first])}")
            if plot is not None:
                terminal.out.print(f"wrote {plot}")
    if any(result.decision is not None and result.decision.holds is not True for result in results.values()):
        fail(1)


def compare_two(
    program: Program,
    files: Sequence[tuple[Path, Path]],
    data: Path,
    *,
    by: str,
    as_json: bool,
    reading: Mapping[str, Any],
    **options: Any,
) -> None:
    """Which of two models is better. The exit code is 1 unless the first is shown to be better."""
    if len(files) != 2:
        raise CmrcError(
            "--better compares two lowered models", fix="cmrc verify MODEL LOWERED PLAN LOWERED PLAN --better iia"
        )
    plans = [Plan.load(file) for _, file in files]
    models = [plan if str(path) == "-" else trace(path) for (path, _), plan in zip(files, plans, strict=True)]
    result = better(
        program,
        models[0],
        models[1],
        data,
        by=by,
        plans=(plans[0], plans[1]),
        watch=terminal.progress,
        **options,
        **reading,
    )
    if as_json:
        print(json.dumps({"first": str(files[0][1]), "second": str(files[1][1]), **result.to_json()}, indent=1))
    else:
        terminal.out.print(f"first {files[0][1]}, second {files[1][1]}\n{result}")
    if result.better != 0:
        fail(1)
