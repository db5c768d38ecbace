"""`cmrc bench`: how fast ONNX files run beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cmrc.cli import terminal
from cmrc.cli.options import AsJson, parse_sizes
from cmrc.cli.terminal import bar, columns, reported
from cmrc.hosts.onnx.bench import PROVIDERS, Bench, bench

app = typer.Typer(add_completion=False)


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
