"""`cmrc` and `python -m cmrc`."""

from __future__ import annotations

from cmrc.cli import process


def main() -> None:
    """Run the command line. Ctrl-C is answered from here on, while the commands are still being imported."""
    process.accept_every_character()
    with process.stoppable():
        from cmrc.cli.app import app

        app(prog_name="cmrc")


if __name__ == "__main__":
    main()
