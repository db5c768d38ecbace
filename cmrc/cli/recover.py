"""`cmrc recover`: a model and a plan become a smaller model that is then trained towards the original, without labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cmrc.cli import terminal
from cmrc.cli.options import NPY, AsJson, Force, Model, Output, PlanFile, Quiet, Seed, Verbose, examples, new_app
from cmrc.cli.outputs import require_output
from cmrc.cli.terminal import reported
from cmrc.files import require_writable
from cmrc.program.lower import lower
from cmrc.program.program import trace
from cmrc.recovery.recover import LABELS, RATE, VALUES, Round, recover
from cmrc.statistics import distributed

app = new_app()


@app.command(
    "recover",
    epilog=examples(
        "cmrc recover model.onnx plan.json --data train.npz -o small.onnx",
        "cmrc recover model.onnx plan.json --data images/ --held-out more/ --minutes 60 --checkpoint run.ckpt -o small.onnx",
        "cmrc verify model.onnx small.onnx plan.json --data test.npz --swaps 0",
    ),
)
def recover_command(
    model: Model,
    plan: PlanFile,
    output: Output,
    data: Annotated[
        Path, typer.Option(metavar="DATA", help=f"Training data, with or without labels: {NPY}.", show_default=False)
    ],
    held_out: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Data to judge by.", show_default="a tenth of --data")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, metavar="NUMBER", help="The longest time to train.")] = 10.0,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="NUMBER",
            help="Train for this many steps instead; the result then depends on the seed alone.",
            show_default=False,
        ),
    ] = None,
    train: Annotated[
        str, typer.Option(metavar="all|folded", help="Train all weights, or only those that lowering changed.")
    ] = "all",
    loss: Annotated[
        str, typer.Option(metavar="auto|kl|squared-error", help="The loss between the outputs and the original's.")
    ] = "auto",
    batch: Annotated[int, typer.Option(min=1, metavar="NUMBER", help="Samples per step.")] = 32,
    rate: Annotated[
        float, typer.Option(min=0, metavar="NUMBER", help="The largest step, relative to the size of the weights.")
    ] = RATE,
    values: Annotated[
        float, typer.Option(min=0, metavar="NUMBER", help="The weight of inner values in the loss, beside the outputs.")
    ] = VALUES,
    labels: Annotated[
        float, typer.Option(min=0, metavar="NUMBER", help="The weight of labels in the loss, if the data have labels.")
    ] = LABELS,
    seed: Seed = 0,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where to save intermediate results; after an interruption, the same command resumes from there.",
            show_default=False,
        ),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Lower a model by a plan, then train the result towards the original.

    Labels are not needed. The result is the best state on the held-out data, and never worse there than the lowered
    model. It no longer equals the original with units replaced: judge it with `cmrc verify`. Under torchrun, each process
    computes with its rows of every batch.
    """
    first = not distributed.shard()[0]
    with reported(as_json), distributed.group():
        require_output(output, "a model", ".onnx", reads=[model, plan, data, held_out], force=force)
        if checkpoint is not None:
            require_writable(checkpoint)
        program = trace(model)
        lowered = lower(program, plan)
        with shown(quiet or as_json or not first) as tell:
            recovered = recover(
                program, lowered, data, held_out=held_out, minutes=minutes, steps=steps, train=train, loss=loss,  # type: ignore[arg-type]
                batch=batch, rate=rate, values=values, labels=labels, seed=seed, checkpoint=checkpoint, tell=tell,
                spread=True,
            )  # fmt: skip
        if not first:  # only the first process writes
            return
        recovered.save(output, overwrite=force)
        recovery = recovered.recovery
        assert recovery is not None
        if as_json:
            print(json.dumps({"output": str(output), "recovery": recovery.to_json()}, indent=1))
            return
        for line in (*recovered.report.warning(), str(recovery)):
            terminal.out.print(line)
        terminal.out.print(f"\nwrote {output} ({output.stat().st_size:,} bytes)")


@contextmanager
def shown(silent: bool) -> Iterator[Callable[[Round], None]]:
    """A progress bar with the held-out loss, or one line per round if the output goes to a file."""
    if silent:
        yield lambda round: None
    elif not terminal.err.is_terminal:
        yield lambda round: terminal.err.print(f"{round.share:4.0%}, step {round.step}: {_numbers(round)}")
    else:
        columns = TextColumn("recovering"), BarColumn(), TextColumn("{task.fields[numbers]}"), TimeElapsedColumn()
        with Progress(*columns, console=terminal.err, transient=True) as bar:
            task = bar.add_task("", total=1.0, numbers="")
            yield lambda round: bar.update(task, completed=round.share, numbers=_numbers(round))


def _numbers(round: Round) -> str:
    return f"held-out loss {round.held_out:.4g}, best {round.best:.4g}, began with {round.began:.4g}"
