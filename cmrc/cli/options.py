"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cmrc.errors import InputError

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
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output even where it is one of the inputs.")]


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """batch=4, as often as there are sizes."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name or not number.isdigit() or not int(number):
            raise InputError(f"--size {text!r} is not understood", fix="write it as name=4")
        sizes[name] = int(number)
    return sizes
