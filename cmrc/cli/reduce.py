"""`cmrc reduce`: from a model and a goal to a small, verified model, in one command."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from cmrc.cli import terminal
from cmrc.cli.options import (
    AsJson,
    Delta,
    Force,
    Model,
    Output,
    Protected,
    Quiet,
    ReportFile,
    Seed,
    SiteNames,
    Verbose,
    batch_option,
    data_option,
    examples,
    held_out_option,
    keep_option,
    new_app,
)
from cmrc.cli.outputs import require_output
from cmrc.cli.recipe_options import preset_option
from cmrc.cli.sections import Sectioned
from cmrc.cli.terminal import fail, print_table, progress, reported
from cmrc.cli.wording import in_flags, page_in_flags
from cmrc.errors import RecipeError
from cmrc.files import require_writable
from cmrc.hosts.onnx.bench import PROVIDERS
from cmrc.reduction.account import account_of
from cmrc.reduction.frontier import SHARES
from cmrc.reduction.page import page_of, require_report, write_page
from cmrc.reduction.reducer import PRESET, SHARE, reduce
from cmrc.reduction.result import Reduction
from cmrc.reduction.samples import LIMIT, MOST

app = new_app()
KINDS = "a .npy or .npz file, a folder of pictures, audio or .npz files, texts (.txt, .jsonl), or script.py:loader"
UNITS = {"ms": 1.0, "us": 1e-3, "s": 1e3}


class ReduceCommand(Sectioned):
    """`cmrc reduce --help`: what most people need comes first."""

    sections: ClassVar = {
        "What goes in and comes out": ("output", "data", "held_out", "report", "work", "force"),
        "Goals (they combine)": (
            "speedup", "latency", "size", "macs", "agreement", "measured", "delta", "drop", "metric",
        ),
        "Instead of a goal": ("pick", "keep"),
        "Kinds of data": ("normalise", "side", "tokenizer", "length", "rate", "seconds", "samples", "batch"),
        "How answers are compared": ("answer", "reads", "class_axis", "tolerance"),
        "How sizes are planned": ("frontier", "sites", "protect", "preset", "refit", "seed"),
        "Afterwards": ("recover", "swaps", "timed", "threads", "provider"),
    }  # fmt: skip


@app.command(
    "reduce",
    cls=ReduceCommand,
    epilog=examples(
        "cmrc reduce model.onnx --data images/ -o small.onnx",
        "cmrc reduce model.onnx --data train.npz --held-out test.npz --agreement 0.97 -o small.onnx",
        "cmrc reduce model.onnx --data data.py:loader --speedup 1.5 --drop 0.01 -o small.onnx",
        "cmrc reduce model.onnx --data reviews.jsonl --tokenizer tokenizer/ -o small.onnx",
        "cmrc reduce bert-folder/ --data texts/ -o small.onnx --report report.html",
        "cmrc reduce model.onnx --data images/ -o small.onnx --pick 0.6",
    )
    + "\n\nExit codes: 0: ready; 1: not ready (the verdict says why); 2: invalid input; 130: interrupted.",
)
def reduce_command(
    model: Model,
    output: Output,
    data: Annotated[str | None, data_option(KINDS, "random numbers")] = None,
    held_out: Annotated[str, held_out_option("PART|DATA")] = str(SHARE),
    speedup: Annotated[float | None, typer.Option(metavar="TIMES", help="How many times as fast, as 1.5.")] = None,
    size: Annotated[float | None, typer.Option(metavar="PART", help="At most this share of the file size.")] = None,
    macs: Annotated[float | None, typer.Option(metavar="PART", help="At most this share of the multiply-adds.")] = None,
    latency: Annotated[str | None, typer.Option(metavar="TIME", help="The longest time per run, as 5ms.")] = None,
    agreement: Annotated[
        float | None,
        typer.Option(
            metavar="PART", help="The same answer as the original on at least this share of inputs, certified."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="SCRIPT",
            help="script.py:function of (outputs, labels): a number, or one per sample; higher is better.",
        ),
    ] = None,
    drop: Annotated[
        float | None, typer.Option(metavar="LOSS", help="At most this loss of the metric, or of the accuracy.")
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measured", help="Judge agreement by the measured value, without a certificate.")
    ] = False,
    keep: Annotated[float | None, keep_option("a share (0.5)", default=False)] = None,
    pick: Annotated[float | None, typer.Option(metavar="PART", help="Take this size of the table.")] = None,
    frontier: Annotated[
        str, typer.Option(metavar="PARTS", help="The sizes to try, as shares of the multiply-adds.")
    ] = ",".join(f"{share:g}" for share in SHARES),
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where intermediate results are kept: the same command resumes there, and another goal takes seconds.",
            show_default="OUTPUT.work",
        ),
    ] = None,
    sites: SiteNames = None,
    protect: Protected = None,
    preset: Annotated[str, preset_option()] = PRESET,
    refit: Annotated[
        bool, typer.Option(help="Fit each layer after the replacements before it: better, and slower.")
    ] = True,
    samples: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="NUMBER",
            help="The largest number of samples to use.",
            show_default=f"{LIMIT}, up to {MOST} of a light model, fewer of a large one",
        ),
    ] = None,
    batch: Annotated[int | None, batch_option("by memory")] = None,
    normalise: Annotated[
        str | None,
        typer.Option(
            metavar="HOW", help="Pictures: imagenet, unit, symmetric or raw.", show_default="by the model's shape"
        ),
    ] = None,
    side: Annotated[
        str | None,
        typer.Option(metavar="PIXELS", help="Pictures, for a model of any size: 224, or 48x320.", show_default="224"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Texts: where the model's tokenizer.json is.", show_default="the model's own folder"
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, metavar="NUMBER", help="Texts: the largest number of tokens.", show_default="128"),
    ] = None,
    rate: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Audio: samples per second.", show_default="16000")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="NUMBER", help="Audio, for a model of any length.", show_default="4"),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which output is judged, if there are several.", show_default="the first"),
    ] = None,
    reads: Annotated[
        str | None, typer.Option(metavar="HOW", help="How an output is read: classes, binary, values or embedding.")
    ] = None,
    class_axis: Annotated[int, typer.Option(metavar="AXIS", help="The axis of the classes.")] = -1,
    tolerance: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="How far values may differ and still agree.")
    ] = None,
    delta: Delta = 0.05,
    swaps: Annotated[
        int,
        typer.Option(min=0, metavar="NUMBER", help="Also verify the result under this many interchange interventions."),
    ] = 0,
    recover: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            help="Train sizes towards the original, without labels, so that a smaller one can meet a quality goal (needs torch).",
        ),
    ] = None,
    timed: Annotated[bool, typer.Option(help="Time every size under onnxruntime.")] = True,
    threads: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Threads inside an op, when timing.")] = 1,
    provider: Annotated[
        str, typer.Option(metavar="NAME", help=f"Where to time: {', '.join(PROVIDERS)}, or onnxruntime's own name.")
    ] = "cpu",
    report: ReportFile = None,
    seed: Seed = 0,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """From a model and a goal to a small, verified model, in one command.

    It plans several sizes, measures each on held-out samples, and takes the one that meets your goals: the best that is small
    enough, or the smallest that is good enough. Without a goal: the smallest that agrees with the original on 0.98 of them. It
    writes the small model, and its plan beside it for `cmrc check` and `cmrc verify`.
    """
    with reported(as_json):
        require_output(output, "a model", ".onnx", reads=[model], force=force)
        plan_file = output.with_suffix(".plan.json")
        require_writable(plan_file)
        if report is not None:
            require_report(report)
        result = reduce(
            model, data, held_out=as_held_out(held_out), speedup=speedup, size=size, macs=macs,
            latency=None if latency is None else as_milliseconds(latency), agreement=agreement, metric=metric,
            drop=drop, measured=measured, keep=keep, pick=pick, frontier=as_parts(frontier), sites=sites or "*",
            protect=protect or (), preset=preset, refit=refit, samples=samples, batch=batch, normalise=normalise,
            side=side, tokenizer=tokenizer, length=length, rate=rate, seconds=seconds, answer=int(answer) if answer and answer.isdigit() else answer, reads=reads,
            class_axis=class_axis, tolerance=tolerance, delta=delta, swaps=swaps, recover=recover, timed=timed, threads=threads,
            provider=provider, seed=seed, work=work or output.with_suffix(".work"), observer=Stages(),
        )  # fmt: skip
        result.plan.save(plan_file)
        result.save(output, overwrite=True)
        pages = []
        if report is not None:
            account = page_in_flags(account_of(result, model.resolve().name))
            pages = write_page(page_of(account), account, report)
        if as_json:
            print(json.dumps({"output": str(output), "plan": str(plan_file), **result.to_json()}, indent=1))
        else:
            show(result, [output, plan_file, *pages])
    if not result.ready:
        fail(1)


def show(result: Reduction, written: Sequence[Path]) -> None:
    """The sizes, the chosen one, notes on it, and the verdict."""
    head, *rows = result.frontier()
    print_table(head, rows)
    terminal.out.print()
    print_table(("", "before", "after", ""), result.summary())
    terminal.out.print()
    for note in result.notes():
        terminal.out.print(f"note: {in_flags(note)}", markup=False)
    if result.verification is not None:
        terminal.out.print(result.verification.verdict, markup=False)
    exact = "is" if result.check.holds else "is NOT"
    whole = "the small model" if result.lowered.recovery is None else "before it was trained, the small model"
    terminal.out.print(
        f"check: {whole} {exact} exactly the original with {replaced(result)} units replaced "
        f"(off by {result.check.error:.1e}, allowed {result.check.tolerance:.0e})",
        markup=False,
    )
    terminal.out.print(f"wrote {', '.join(map(str, written[:-1]))} and {written[-1]}", markup=False)
    terminal.out.print(in_flags(result.verdict), markup=False)


def replaced(result: Reduction) -> int:
    return sum(len(entry.units) for entry in result.plan.entries)


@dataclass(slots=True)
class Stages:
    """One line per stage, and a progress bar with the remaining time in a terminal."""

    begin: float = field(default_factory=time.monotonic)

    def stage(self, name: str, detail: str) -> None:
        if not terminal.out.quiet:
            seconds = time.monotonic() - self.begin
            terminal.err.print(f"{seconds:6.1f} s  {name:<12}{detail}", markup=False, soft_wrap=True)

    def track(self, items: Iterable[Any], count: int | None, what: str) -> Iterable[Any]:
        return progress(items, count, what)


def as_held_out(text: str) -> float | str:
    """A share of the data, or other data."""
    try:
        return float(text)
    except ValueError:
        return text


def as_milliseconds(text: str) -> float:
    """5ms, 0.5s, 300us; a number alone means milliseconds."""
    number = text.strip()
    unit = next((unit for unit in UNITS if number.endswith(unit)), "")
    try:
        return float(number.removesuffix(unit)) * UNITS.get(unit, 1.0)
    except ValueError as error:
        raise RecipeError(f"--latency {text} is not a time", fix="write --latency 5ms") from error


def as_parts(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise RecipeError(f"--frontier {text} is not a list of shares", fix="write --frontier 0.8,0.6,0.4") from error
