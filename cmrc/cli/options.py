"""Arguments and options that several commands share, and the texts of their help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cmrc.cli import terminal
from cmrc.cli.outputs import readable
from cmrc.errors import InputError

NPY = "a .npy file, a .npz file with one array per input name, or a folder of them; `labels` beside the inputs"

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="An ONNX model, or a Hugging Face checkpoint folder; - for standard input.",
        show_default=False,
        callback=readable(".onnx"),
    ),
]
PlanFile = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN", help="A plan file; - for standard input.", show_default=False, callback=readable(".json")
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Where to write. The file is written completely or not at all.",
        show_default=False,
    ),
]
OutputOrStream = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Where to write; - for standard output. The file is written completely or not at all.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output even if it is one of the inputs.")]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--size",
        metavar="NAME=NUMBER",
        help="A dynamic size of the random inputs, as batch=4. Can be repeated.",
        show_default="2",
    ),
]
SiteNames = Annotated[
    list[str] | None,
    typer.Option(
        "--sites", metavar="NAME", help="A site name or a glob. Can be repeated.", show_default="all that fold"
    ),
]
Protected = Annotated[
    list[str] | None,
    typer.Option("--protect", metavar="NAME", help="A site name or a glob to leave as it is. Can be repeated."),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Also write a report (.html), with the same content as .md and .json beside it.",
    ),
]
Delta = Annotated[float, typer.Option(metavar="NUMBER", help="The probability with which a certificate may be wrong.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Quiet = Annotated[
    bool,
    typer.Option("-q", "--quiet", callback=terminal.set_quiet, help="Print errors only; the exit code says the rest."),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "-v", "--verbose", callback=terminal.set_verbose, help="Also print times, and where an error comes from."
    ),
]


# Options with a different default in each command. Where a recipe or the data decide the default, only the help names it.


def seed_option(default: str | bool = True) -> Any:
    return typer.Option(
        min=0, metavar="NUMBER", help="Seed for everything that is drawn at random.", show_default=default
    )


def batch_option(default: str | bool = True) -> Any:
    return typer.Option("--batch", min=1, metavar="NUMBER", help="Samples per run.", show_default=default)


def data_option(kinds: str, default: str | bool = True) -> Any:
    return typer.Option("--data", metavar="DATA", help=f"What to calibrate on: {kinds}.", show_default=default)


def held_out_option(metavar: str, default: str | bool = True) -> Any:
    which = "Data to judge on, separate from the calibration data"
    part = ", or the share of the data to set apart" if "PART" in metavar else ""
    return typer.Option("--held-out", metavar=metavar, help=f"{which}{part}.", show_default=default)


def keep_option(amounts: str, default: str | bool = True) -> Any:
    return typer.Option(
        "--keep", metavar="AMOUNT", help=f"Units to keep of every site: {amounts}.", show_default=default
    )


CalibrationData = Annotated[Path, data_option(NPY, False)]
Seed = Annotated[int, seed_option()]
BatchSize = Annotated[int, batch_option()]


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def new_app() -> typer.Typer:
    """A separate command. Its help is plain text, since it is also read in pipes and pagers."""
    return typer.Typer(add_completion=False, rich_markup_mode=None)


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Sizes such as batch=4, one per option."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name or not number.isdigit() or not int(number):
            raise InputError(f"--size {text!r} is not understood", fix="write it as name=4")
        sizes[name] = int(number)
    return sizes


def as_position(text: str) -> str | int:
    return int(text) if text.lstrip("-").isdigit() else text
