"""`cmrc` and `python -m cmrc`."""

from __future__ import annotations

import sys

from cmrc._version import __version__
from cmrc.cli import process


def main() -> None:
    """Run the command line. Ctrl-C is answered from here on, while the commands are still being imported."""
    if sys.argv[1:] == [
        "--version"
    ]:  # typer would load pydantic to read one flag, which takes longer than all the rest
        sys.stdout.write(f"{__version__}\n")
        return
    process.accept_every_character()
    with process.stoppable():
        from cmrc.cli.app import app

        app(prog_name="cmrc")


if __name__ == "__main__":
    main()
