"""`cmrc demo`: the whole workflow with a model and data that come with the package, offline, in a minute."""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path
from typing import Annotated, Any

import typer

from cmrc.cli import terminal
from cmrc.cli.options import Quiet, Verbose, examples, new_app
from cmrc.cli.terminal import fail, reported
from cmrc.errors import FileError

app = new_app()

FILES = Path(__file__).parents[1] / "demo"
GIVEN = {"digits.onnx": "model.onnx", "digits_train.npz": "train.npz", "digits_test.npz": "test.npz"}
STORY = (
    ("What can be replaced in this model?", "inspect model.onnx"),
    (
        "Make it smaller: the smallest size that gives the same answer on at least 97 % of new inputs.",
        "reduce model.onnx --data train.npz --held-out test.npz --agreement 0.97 -o small.onnx",
    ),
    (
        "Is the file exactly the model with those units replaced? And how often does it give the same answer?",
        "check model.onnx small.onnx small.plan.json --data test.npz",
    ),
    ("Does it use its units as the original does? Swap their values between inputs, in both models.",
     "verify model.onnx small.onnx small.plan.json --data test.npz --swaps 500"),
    ("Where does the file come from?", "provenance small.onnx --model model.onnx --plan small.plan.json"),
)  # fmt: skip


@app.command(
    "demo",
    epilog=examples("cmrc demo", "cmrc demo my-folder")
    + "\n\nThe model is a small convolutional classifier of 8 x 8 digits, with 1797 pictures. Nothing is downloaded.",
)
def demo(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to put the files.")] = Path("cmrc-demo"),
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run the whole workflow offline, with a small model that comes with cmrc.

    Every command is printed before it runs, so that you can run it again, or change it.
    """
    with reported(as_json=False):
        lay_out(folder)
    for why, command in STORY:
        terminal.out.print(f"\n# {why}\n$ cmrc {command}", style="bold")
        code = run(
            context.find_root().command,
            folder,
            [*command.split(), *(["-q"] if quiet else []), *(["-v"] if verbose else [])],
        )
        if code:
            fail(code)
    terminal.out.print(f"\nAll files are in {folder}. Next, try your own model: cmrc reduce --help", style="bold")


def lay_out(folder: Path) -> None:
    """The files of the demo, under the names that its commands use."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, called in GIVEN.items():
            shutil.copyfile(FILES / name, folder / called)
    except OSError as error:
        raise FileError(f"cannot write to {folder}: {error.strerror or error}", fix="name another folder") from error


def run(commands: Any, folder: Path, words: list[str]) -> int:
    """Run one command of the demo in that folder, as typed there, and return its exit code."""
    with chdir(folder):
        return int(commands.main(words, prog_name="cmrc", standalone_mode=False) or 0)
