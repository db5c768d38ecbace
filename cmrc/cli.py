"""The command line. Exit codes: 0 it holds, 1 it does not (a check fails, a replacement stays), 2 the input is bad."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from typer.core import TyperGroup

import cmrc
from cmrc import distributed
from cmrc.batches import SIZE, read_arrays
from cmrc.bench import PROVIDERS, Bench, bench
from cmrc.calibrate import calibrate
from cmrc.curvature import LOSSES
from cmrc.errors import CheckError, CmrcError, InputError, RecipeError, ResidueError
from cmrc.files import require_picture, require_writable
from cmrc.inputs import parse_sizes, random_inputs, require_known
from cmrc.ir import Graph
from cmrc.lower import compare, lower
from cmrc.plan import Plan, difference, to_ranges
from cmrc.planning import plan as make_plan
from cmrc.plots import plot_scores
from cmrc.program import Program, trace
from cmrc.recipe import PRESETS
from cmrc.stats import NEEDS, Stats
from cmrc.text import to_text
from cmrc.verification import Verification, draw_plans
from cmrc.verify import verify

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=(
    "Causal mechanism reduction compiler: fold do(unit := constant or affine function of others) into a smaller model."
    "\n\nA first round:  cmrc inspect MODEL.onnx;  "
    "cmrc plan MODEL.onnx --data DIR --keep 0.5 -o plan.json (or write one in Python: cmrc.Plan);  "
    "cmrc lower MODEL.onnx plan.json -o small.onnx;  "
    "cmrc check MODEL.onnx small.onnx plan.json;  "
    "cmrc verify MODEL.onnx small.onnx plan.json --data held-out.npz"
))  # fmt: skip


class MakeOrRead(TyperGroup):
    """`plan MODEL ...` makes a plan; `plan show` and `plan diff` read one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help",):
            args = ["make", *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(cls=MakeOrRead, no_args_is_help=True, help="Make a plan: `cmrc plan MODEL ...`; or read one.")
app.add_typer(plan_app, name="plan")
WIDE = 10_000  # characters of a line in a file or a pipe, where nobody's window cuts a name
out = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDE)
err = Console(stderr=True, highlight=False)

Model = Annotated[Path, typer.Argument(help="An ONNX model.", show_default=False)]
PlanFile = Annotated[Path, typer.Argument(help="A plan file, as Plan.save writes it.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Output = Annotated[
    Path, typer.Option("-o", "--output", help="Where to write; appears whole or not at all.", show_default=False)
]
Data = Annotated[
    Path | None,
    typer.Option(help="Inputs: .npz with an array per input name, or .npy for a single input. Random if absent."),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--size", help="A size known only at run time, for random inputs: batch=4. 2 if absent."),
]


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn a CmrcError into its text (or JSON) and exit code."""
    try:
        yield
    except CmrcError as error:
        if as_json:
            told = {
                "kind": error.kind,
                "node": error.node,
                "op": error.op,
                "reason": error.reason,
                "at": error.at,
                "fix": error.fix,
            }
            print(json.dumps({"error": told}, indent=1))
        else:
            err.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, (ResidueError, CheckError)) else 2) from error


def columns(*names: str) -> Table:
    """A table whose cells are folded where the window is narrow, and never cut."""
    made = Table(box=None, header_style="bold")
    for name in names:
        made.add_column(name, overflow="fold")
    return made


def fail(code: int) -> NoReturn:
    raise typer.Exit(code)


@app.callback(invoke_without_command=True)
def main_options(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(cmrc.__version__)
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
        out.print(table)
        cost = program.cost()
        out.print(
            f"{len(found)} sites; {cost.parameters:,} parameters, {cost.macs:,} MACs (sizes of run time count as 1)"
        )


def inspect_groups(program: Program, pattern: str, folds: bool, as_json: bool) -> None:
    found = program.groups(pattern, folds=folds)
    if as_json:
        print(json.dumps({"groups": [group.to_json() for group in found]}, indent=1))
        return
    for group in found:
        out.print(str(group), markup=False)
    out.print(f"{len(found)} groups")


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
                err.print(f"; {name}\n{to_text(graph)}", markup=False, soft_wrap=True)

        lowered = lower(model, plan, residue=residue, watch=show)  # type: ignore[arg-type]
        lowered.save(output)
        if as_json:
            print(json.dumps({"output": str(output), "report": lowered.report.to_json()}, indent=1))
            return
        out.print(str(lowered.report), markup=False)
        out.print(f"\nwrote {output} ({output.stat().st_size:,} bytes)", markup=False)


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
            out.print(str(result))
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
                out.print(f"{name}\n{result}\n", markup=False)
            for name in [] if until else others:  # runs that stop by themselves are not of the same swaps
                out.print(f"{name} minus {first}: {found[name].minus(found[first])}", markup=False)
            if plot is not None:
                out.print(f"wrote {plot}", markup=False)
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
    out.print(table)
    sessions, rounds = result.files[0].seconds.shape
    out.print(
        f"batch {result.samples}, {result.threads} thread(s); medians of {sessions} sessions of {rounds} runs, with 95 % "
        f"intervals; {result.clock}; speed-up over the first file"
    )


@app.command()
def annotate(model: Model, plan: PlanFile, output: Output, as_json: AsJson = False) -> None:
    """Write the plan's do's onto the model's nodes, without lowering: `cmrc.lower` takes such a file as it is."""
    with reported(as_json):
        require_writable(output)
        trace(model).annotate(Plan.load(plan)).save(output)
        print(json.dumps({"output": str(output)})) if as_json else out.print(f"wrote {output}", markup=False)


@plan_app.command("show")
def plan_show(plan: PlanFile, as_json: AsJson = False) -> None:
    """Show a plan: every do with its site, units and constants, and the model it was made for."""
    with reported(as_json):
        loaded = Plan.load(plan)
        rows = [
            {"do": i, "site": e.site, "value": e.value, "axis": e.axis, "units": to_ranges(e.units),
             "count": len(e.units),
             "becomes": "affine" if e.weight is not None else "constant", "parents": to_ranges(e.parents),
             "smallest": float(e.constant.min()), "largest": float(e.constant.max())}
            for i, e in enumerate(loaded.entries)
        ]  # fmt: skip
        if as_json:
            digest = loaded.fingerprint.digest if loaded.fingerprint else None
            print(json.dumps({"plan": str(plan), "model": digest, "made": loaded.made, "do": rows}, indent=1))
            return
        table = columns("do", "site", "axis", "replaced", "units", "becomes")
        for e, r in zip(loaded.entries, rows, strict=True):
            span = f"{r['smallest']:.4g} .. {r['largest']:.4g}"
            becomes = (
                f"affine function of {len(e.parents)} units, bias {span}"
                if e.weight is not None
                else f"constants {span}"
            )
            table.add_row(f"[{r['do']}]", e.site, str(e.axis), str(r["count"]), _short(str(r["units"])), becomes)
        out.print(table)
        show_made(loaded)
        if loaded.fingerprint:
            out.print(f"for model {loaded.fingerprint.digest} with {len(loaded.fingerprint.weights)} parameters")


# ---------------------------------------------------------------- calibrating and planning

CalibrationData = Annotated[
    Path,
    typer.Option(
        "--data", help="A folder of .npy or .npz files, or one file; .npz arrays by input name, and `labels`.",
        show_default=False,
    ),
]  # fmt: skip
SiteNames = Annotated[
    list[str] | None, typer.Option("--sites", help="A site, or a glob of them; all that fold if absent.")
]
PositionsOption = Annotated[
    str, typer.Option(help="Which positions are samples: all, each, a number, or the name of a mask in the data.")
]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="Samples that are run at a time.")]


def bar(found: Iterable[Any], count: int | None, what: str = "calibrating") -> Iterable[Any]:
    """A progress bar, where somebody watches."""
    return track(found, what, total=count, console=err, transient=True, disable=not err.is_terminal)


@app.command("calibrate")
def calibrate_command(
    model: Model,
    data: CalibrationData,
    output: Output,
    sites: SiteNames = None,
    need: Annotated[
        list[str] | None, typer.Option(help=f"Any of {', '.join(NEEDS)}; means and variances are always there.")
    ] = None,
    positions: PositionsOption = "all",
    loss: Annotated[str, typer.Option(help=f"What curvature is of: {', '.join(LOSSES)}.")] = "cross-entropy",
    batch: BatchSize = SIZE,
    seed: Annotated[int, typer.Option(min=0, help="For what is drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Run a model over data and write the statistics of its sites. Under torchrun every process takes its share."""
    with reported(as_json), distributed.group():
        require_writable(output)
        stats = calibrate(
            trace(model), data, sites=sites or "*", need=need or (), positions=as_position(positions),
            loss=loss, seed=seed, size=batch, shard=distributed.shard(), watch=bar,
        )  # fmt: skip
        stats = distributed.all_merge(stats)
        if distributed.shard()[0]:
            return
        stats.save(output)
        if as_json:
            told = {name: {"units": s.columns.units, "rows": s.count, "how": s.how} for name, s in stats.sites.items()}
            print(
                json.dumps(
                    {"output": str(output), "samples": stats.samples, "data": stats.digest, "sites": told}, indent=1
                )
            )
            return
        out.print(
            f"wrote {output}: {len(stats.sites)} sites, {stats.samples} samples, data {stats.digest}", markup=False
        )


def as_position(text: str) -> str | int:
    return int(text) if text.lstrip("-").isdigit() else text


def as_amount(text: str) -> int | float:
    """0.5 is a part, 64 a number."""
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError as error:
        raise RecipeError(f"{text!r} is no number", fix="write 0.5 for a part, 64 for a number") from error


def pairs(texts: Sequence[str]) -> int | float | dict[str, int | float]:
    """--keep 0.5, or --keep 'blocks.*=0.5' as often as needed."""
    if len(texts) == 1 and "=" not in texts[0]:
        return as_amount(texts[0])
    split = [text.rpartition("=") for text in texts]
    if whole := [amount for name, _, amount in split if not name]:
        raise RecipeError(
            f"--keep {whole[0]} stands beside others", fix="give one for all sites, or each as 'site=0.5'"
        )
    return {name: as_amount(amount) for name, _, amount in split}


@plan_app.command("make")
def plan_make(
    model: Model,
    output: Output,
    data: Annotated[
        Path | None, typer.Option(help="Calibration data: a folder of .npy or .npz files, or one file.")
    ] = None,
    stats: Annotated[Path | None, typer.Option(help="Statistics that `cmrc calibrate` wrote, instead of data.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A recipe (YAML). What is said here besides overrides it.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="What stays: 0.5 or 64, or by site or glob: 'blocks.*=0.5'.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Instead of keep, for the whole model: parameters=0.5, macs, bytes or latency.")
    ] = None,
    sites: SiteNames = None,
    seed: Annotated[int | None, typer.Option(min=0, help="For what is drawn.")] = None,
    certify: Annotated[
        str | None, typer.Option(help="Instead of keep: the smallest plan of which this is certified, 'iia>=0.95'.")
    ] = None,
    held_out: Annotated[Path | None, typer.Option(help="Data to certify on, apart from those of calibration.")] = None,
    delta: Annotated[float, typer.Option(help="The certificate may fail with this probability.")] = 0.05,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the scores of every site, with the cut, to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a plan from a model, data (or statistics) and a recipe. The word `make` may be left out."""
    with reported(as_json):
        require_writable(output)
        if plot is not None:
            require_picture(plot)
        options: dict[str, Any] = {"preset": preset, "sites": sites, "seed": seed}
        program = trace(model)
        if keep:
            options["keep"] = pairs(keep)
        if budget is not None:
            of, _, amount = budget.partition("=")
            if not amount:
                raise RecipeError(f"--budget {budget} says not how much", fix=f"write --budget {of}=0.5")
            options["budget"] = {"of": of, "amount": as_amount(amount)}
        options = {name: value for name, value in options.items() if value is not None}
        known = Stats.load(stats) if stats is not None else None
        made = make_plan(
            program, known, data=data, recipe=recipe, watch=bar, certify=certify, held_out=held_out, delta=delta,
            **options,
        )  # fmt: skip
        made.save(output)
        if plot is not None:
            plot_scores(made, plot)
        if as_json:
            print(json.dumps({"output": str(output), **made.made}, indent=1))
            return
        show_made(made)
        out.print(f"wrote {output}: {len(made)} replacements", markup=False)


def show_made(plan: Plan) -> None:
    """How a plan came about, for a person."""
    if not plan.made:
        return
    recipe = plan.made["recipe"]
    out.print(
        f"{recipe['preset']}: objective {recipe['objective']}, selection {recipe['select']}, replacement "
        f"{recipe['replace']}; seed {recipe['seed']}; data {plan.made['data']} of {plan.made['samples']} samples",
        markup=False,
    )
    table = columns("site", "units", "kept", "predicted risk", "remark")
    for site, told in plan.made["sites"].items():
        remark = told.get("curvature", "")
        if "mean instead of c*" in told:
            remark += f"; the mean for {told['mean instead of c*']} columns without a c*"
        table.add_row(site, str(told["units"]), str(told["kept"]), f"{told['predicted']:.4g}", remark)
    out.print(table)
    certificate = plan.made.get("certificate")
    if certificate:
        out.print(
            f"{certificate['target']} is certified with probability {1 - certificate['delta']:g} at keep {certificate['keep']}, "
            f"the smallest of {len(certificate['tests'])} tested",
            markup=False,
        )


@plan_app.command("diff")
def plan_diff(
    first: PlanFile,
    second: Annotated[Path, typer.Argument(help="Another plan.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare two plans: units that one replaces and the other does not. Exit code 1 if they differ."""
    with reported(as_json):
        rows = difference(Plan.load(first), Plan.load(second))
        if as_json:
            print(json.dumps({"same": not rows, "sites": rows}, indent=1))
        elif not rows:
            out.print("the plans are the same")
        else:
            table = columns(
                "site", "only in the first", "only in the second", "in both", "Jaccard of kept", "values differ by"
            )
            for row in rows:
                apart = "" if row["values"] is None else f"{row['values']:.3g}"
                cells = (
                    _short(str(row["first"])),
                    _short(str(row["second"])),
                    str(row["both"]),
                    f"{row['jaccard']:.3f}",
                )
                table.add_row(row["site"], *cells, apart)
            out.print(table)
    if rows:
        fail(1)


def _short(text: str, width: int = 40) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


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
