"""`cmrc calibrate` and `cmrc plan`: statistics, plans made and read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cmrc.cli import terminal
from cmrc.cli.terminal import AsJson, Model, Output, PlanFile, bar, columns, fail, reported
from cmrc.errors import RecipeError
from cmrc.files import require_picture, require_writable
from cmrc.planning.planner import plan as make_plan
from cmrc.planning.plots import plot_scores
from cmrc.planning.recipe import PRESETS
from cmrc.program.plan import Plan, difference, to_ranges
from cmrc.program.program import trace
from cmrc.statistics import distributed
from cmrc.statistics.batches import SIZE
from cmrc.statistics.calibrate import calibrate
from cmrc.statistics.curvature import LOSSES
from cmrc.statistics.stats import NEEDS, Stats

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


class MakeOrRead(TyperGroup):
    """`plan MODEL ...` makes a plan; `plan show` and `plan diff` read one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help",):
            args = ["make", *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(cls=MakeOrRead, no_args_is_help=True, help="Make a plan: `cmrc plan MODEL ...`; or read one.")


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
        terminal.out.print(
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
        terminal.out.print(f"wrote {output}: {len(made)} replacements", markup=False)


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
        terminal.out.print(table)
        show_made(loaded)
        if loaded.fingerprint:
            terminal.out.print(
                f"for model {loaded.fingerprint.digest} with {len(loaded.fingerprint.weights)} parameters"
            )


def show_made(plan: Plan) -> None:
    """How a plan came about, for a person."""
    if not plan.made:
        return
    recipe = plan.made["recipe"]
    terminal.out.print(
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
    terminal.out.print(table)
    certificate = plan.made.get("certificate")
    if certificate:
        terminal.out.print(
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
            terminal.out.print("the plans are the same")
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
            terminal.out.print(table)
    if rows:
        fail(1)


def _short(text: str, width: int = 40) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
