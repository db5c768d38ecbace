"""`cmrc bench`: compare how fast ONNX files run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, Quiet, Seed, Verbose, examples, new_app, parse_sizes
from cmrc.cli.terminal import progress, reported
from cmrc.hosts.onnx.bench import PROVIDERS, bench

app = new_app()


@app.command(
    "bench",
    epilog=examples(
        "cmrc bench model.onnx small.onnx", "cmrc bench model.onnx small.onnx --batch 8 --size sequence=128 --threads 2"
    ),
)
def bench_command(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL", help="ONNX files. The first is the baseline for the others.")
    ],
    batch: Annotated[int, typer.Option(metavar="NUMBER", help="Samples per run.")] = 1,
    size: Annotated[
        list[str] | None,
        typer.Option("--size", metavar="NAME=NUMBER", help="Another dynamic size, as sequence=128. Can be repeated."),
    ] = None,
    threads: Annotated[int, typer.Option(metavar="NUMBER", help="Threads inside an op.")] = 1,
    provider: Annotated[
        str, typer.Option(metavar="NAME", help=f"{', '.join(PROVIDERS)}, or onnxruntime's own name for one.")
    ] = "cpu",
    sessions: Annotated[int, typer.Option(metavar="NUMBER", help="How many times all files are loaded again.")] = 5,
    rounds: Annotated[int, typer.Option(metavar="NUMBER", help="Timed runs of each file per session.")] = 15,
    seed: Seed = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare how fast ONNX files run under onnxruntime.

    All files run in one process, in turns, on random inputs and in random order.
    """
    with reported(as_json):
        result = bench(
            models, batch=batch, sizes=parse_sizes(size or []), threads=threads, provider=provider, sessions=sessions,
            rounds=rounds, seed=seed, watch=lambda numbers: progress(numbers, sessions, "sessions"),
        )  # fmt: skip
        print(json.dumps(result.to_json(), indent=1)) if as_json else terminal.out.print(str(result))
