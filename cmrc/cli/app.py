"""The command line. Exit codes: 0 it holds, 1 it does not (a check fails, a replacement stays), 2 the input is bad."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from cmrc._version import __version__
from cmrc.cli import terminal
from cmrc.cli.plan import calibrate_command, plan_app
from cmrc.cli.terminal import AsJson, Data, Model, Output, PlanFile, Sizes, bar, columns, fail, reported
from cmrc.errors import CmrcError, InputError
from cmrc.files import require_picture, require_writable
from cmrc.hosts.inputs import parse_sizes, random_inputs, require_known
from cmrc.hosts.onnx.bench import PROVIDERS, Bench, bench
from cmrc.ir.graph import Graph
from cmrc.ir.text import to_text
from cmrc.program.lower import compare, lower
from cmrc.program.plan import Plan
from cmrc.program.program import Program, trace
from cmrc.statistics.batches import read_arrays
from cmrc.verification.result import Verification, draw_plans
from cmrc.verification.verifier import verify

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(
    "Causal mechanism reduction compiler: fold do(unit := constant or affine function of others) into a smaller model."
    "\n\nA first round:  cmrc inspect MODEL.onnx;  "
    "cmrc plan MODEL.onnx --data DIR --keep 0.5 -o plan.json (or write one in Python: cmrc.Plan);  "
    "cmrc lower MODEL.onnx plan.json -o small.onnx;  "
    "cmrc check MODEL.onnx small.onnx plan.json;  "
    "cmrc verify MODEL.onnx small.onnx plan.json --data held-out.npz"
))  # fmt: skip
app.add_typer(plan_app, name="plan")
app.command("calibrate")(calibrate_command)


@app.callback(invoke_without_command=True)
def main_options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def inspect(
    model: Model,
    sites: Annotated[str, typer.Option(help="Only sites (or groups) whose name matches this glob.")] = "*",
    ir: Annotated[bool, typer.Option("--ir", help="Print the intermediate representation and nothing else.")] = False,
    groups: Annotated[
        bool, typer.Option("--groups", help="What is coupled with what, and why, instead of the sites.")
    ] = False,
    folds: Annotated[
        bool, typer.Option(help="Find out for every site how a replaced unit folds (a dry run each).")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """List the sites of a model (or its groups of coupled units): name, op, units, who reads it, how a replaced unit folds."""
    with reported(as_json):
        program = trace(model)
        if ir:
            print(json.dumps({"ir": to_text(program.graph)}, indent=1) if as_json else to_text(program.graph))
            return
        if groups:
            inspect_groups(program, sites, folds, as_json)
            return
        plain = program.sites(sites, folds=False)
        found = [program.describe(site) for site in bar(plain, None, "dry runs")] if folds else plain
        if as_json:
            rows = [
                {"name": s.name, "value": s.value, "op": s.op, "axis": s.axis, "units": s.units, "shape": list(s.shape),
                 "consumers": list(s.consumers), "folds": s.folds} for s in found
            ]  # fmt: skip
            ops = program.fingerprint.ops
            print(
                json.dumps(
                    {"model": str(model), "digest": program.fingerprint.digest, "ops": ops, "sites": rows}, indent=1
                )
            )
            return
        table = columns("site", "op", "axis", "units", "read by", "a replaced unit")
        for s in found:
            table.add_row(s.name, s.op, str(s.axis), str(s.units), ", ".join(s.consumers), s.folds)
        terminal.out.print(table)
        cost = program.cost()
        terminal.out.print(
            f"{len(found)} sites; {cost.parameters:,} parameters, {cost.macs:,} MACs (sizes of run time count as 1)"
        )


def inspect_groups(program: Program, pattern: str, folds: bool, as_json: bool) -> None:
    found = program.groups(pattern, folds=folds)
    if as_json:
        print(json.dumps({"groups": [group.to_json() for group in found]}, indent=1))
        return
    for group in found:
        terminal.out.print(str(group), markup=False)
    terminal.out.print(f"{len(found)} groups")


@app.command("lower")
def lower_command(
    model: Model,
    output: Output,
    plan: Annotated[
        Path | None, typer.Argument(help="A plan file; the plan that is annotated on the model if absent.")
    ] = None,
    residue: Annotated[
        str,
        typer.Option(help="What to do with a replacement that cannot be folded: 'error', or 'keep' it at run time."),
    ] = "error",
    print_passes: Annotated[bool, typer.Option("--print-passes", help="Print the IR after every pass.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lower a model by a plan and write the smaller one."""
    with reported(as_json):
        if residue not in ("error", "keep"):
            raise CmrcError(f"--residue is {residue!r}", fix="say error or keep")
        require_writable(output)

        def show(name: str, graph: Graph) -> None:
            if print_passes:
                terminal.err.print(f"; {name}\n{to_text(graph)}", markup=False, soft_wrap=True)

        lowered = lower(model, plan, residue=residue, watch=show)  # type: ignore[arg-type]
        lowered.save(output)
        if as_json:
            print(json.dumps({"output": str(output), "report": lowered.report.to_json()}, indent=1))
            return
        terminal.out.print(str(lowered.report), markup=False)
        terminal.out.print(f"\nwrote {output} ({output.stat().st_size:,} bytes)", markup=False)


@app.command()
def check(
    model: Model,
    lowered: Annotated[Path, typer.Argument(help="The lowered model.", show_default=False)],
    plan: PlanFile,
    data: Data = None,
    size: Sizes = None,
    seed: Annotated[int, typer.Option(min=0, help="For random inputs.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Allowed difference, of the output's scale. By the outputs' precision if absent."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a lowered model with the original, its units literally replaced. Exit code 0 only if they are equal."""
    with reported(as_json):
        program, small = trace(model), trace(lowered)
        loaded = Plan.load(plan)
        program.require(loaded)
        inputs = read_inputs(program, data) if data else draw_inputs(program, parse_sizes(size or []), seed)
        result = compare(program.host, program.clamped(loaded), small.host, inputs, tolerance)
        if as_json:
            print(
                json.dumps(
                    {
                        "holds": result.holds,
                        "error": result.error,
                        "tolerance": result.tolerance,
                        "moved": result.moved,
                    },
                    indent=1,
                )
            )
        else:
            terminal.out.print(str(result))
    if not result.holds:
        fail(1)


@app.command("verify")
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


@app.command("bench")
def bench_command(
    models: Annotated[list[Path], typer.Argument(help="ONNX files; the first is what the others are compared with.")],
    batch: Annotated[int, typer.Option(help="Samples a run.")] = 1,
    size: Annotated[
        list[str] | None, typer.Option("--size", help="Another size known only at run time: sequence=128.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads inside an op.")] = 1,
    provider: Annotated[str, typer.Option(help=f"{', '.join(PROVIDERS)}, or onnxruntime's own name of one.")] = "cpu",
    sessions: Annotated[int, typer.Option(help="How often the files are loaded anew.")] = 5,
    rounds: Annotated[int, typer.Option(help="Timed runs of every file in each session.")] = 15,
    seed: Annotated[int, typer.Option(min=0, help="For the random inputs and the order of the runs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare how fast ONNX files run under onnxruntime: all in turn, in one process, on random inputs."""
    with reported(as_json):
        result = bench(
            models, batch=batch, sizes=parse_sizes(size or []), threads=threads, provider=provider, sessions=sessions,
            rounds=rounds, seed=seed,
            watch=lambda found: bar(found, None, "running"),
        )  # fmt: skip
        print(json.dumps(result.to_json(), indent=1)) if as_json else show_bench(result)


def show_bench(result: Bench) -> None:
    table = columns("file", "ms a run", "samples/s", "speed-up", "MB", "peak MB", "ran on")
    names = [file.path.name for file in result.files]
    for file, told in zip(result.files, result.to_json()["files"], strict=True):
        faster = told["faster_than_first"]
        table.add_row(
            file.path.name if names.count(file.path.name) == 1 else str(file.path),
            f"{1e3 * file.median:.3g} ({1e3 * told['low']:.3g}-{1e3 * told['high']:.3g})",
            f"{told['samples_per_second']:,.4g}",
            f"{faster['ratio']:.2f} ({faster['low']:.2f}-{faster['high']:.2f})", f"{file.bytes / 1e6:.4g}",
            "" if file.memory is None else f"{file.memory / 1e6:.4g}",
            file.providers[0].removesuffix("ExecutionProvider"),
        )  # fmt: skip
    terminal.out.print(table)
    sessions, rounds = result.files[0].seconds.shape
    terminal.out.print(
        f"batch {result.samples}, {result.threads} thread(s); medians of {sessions} sessions of {rounds} runs, with 95 % "
        f"intervals; {result.clock}; speed-up over the first file"
    )


@app.command()
def annotate(model: Model, plan: PlanFile, output: Output, as_json: AsJson = False) -> None:
    """Write the plan's do's onto the model's nodes, without lowering: `cmrc.lower` takes such a file as it is."""
    with reported(as_json):
        require_writable(output)
        trace(model).annotate(Plan.load(plan)).save(output)
        print(json.dumps({"output": str(output)})) if as_json else terminal.out.print(f"wrote {output}", markup=False)


def draw_inputs(program: Program, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
    require_known(sizes, program.graph.inputs)
    return random_inputs(program.graph.inputs, sizes, seed)


def read_inputs(program: Program, path: Path) -> dict[str, Any]:
    names = [value.name for value in program.graph.inputs]
    loaded = read_arrays(path)
    if isinstance(loaded, np.ndarray):
        return {names[0]: loaded}
    missing = [name for name in names if name not in loaded]
    if missing:
        raise InputError(
            f"there is no array for input {missing[0]!r}", at=str(path), fix=f"name the arrays {', '.join(names)}"
        )
    return {name: loaded[name] for name in names}


def main() -> None:
    app()


if __name__ == "__main__":
    main()
