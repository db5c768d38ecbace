"""Errors speak of flags on the command line, and every flag that they speak of exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmrc.cli.app import Commands
from cmrc.cli.lazy import load
from cmrc.cli.plan import MakeOrRead
from cmrc.cli.wording import FLAGS, PHRASES, in_flags, reason_in_flags

ROOT = Path(__file__).parent.parent.parent
PYTHON = re.compile(r"\b[a-z_]+=|\b[a-z_]+\.[a-z_]+\(|\b(plan|program|stats|lowered|cmrc|Plan|Stats)\.[a-z_]+")
FLAG = re.compile(r"--[a-z][a-z-]*")

# Errors that only a Python caller meets, and a name=number that the command line itself takes.
ONLY_PYTHON = {
    "a do takes either constant= or affine=",
    "checkpoint= cannot be combined with host= or taps=",
    "save numbers: numpy.save(path, array)",
    "curvature=… is not known",
    "give it: plan=",
    "give keeps= from large to small",
    "give parse the parameters: leaves=...",
    "make it with cmrc.Plan(program)",
    "onnx.version_converter.convert_version(model, 17)",
}
OF_THE_COMMAND_LINE = {
    "write it as name=4",
    "write it as sr=16000",
    "give one value for all sites, or write each as 'site=0.5'",
}


def options() -> set[str]:
    commands = [load(entry) for group in (Commands, MakeOrRead) for entry in group.entries.values()]
    return {
        flag for command in commands for option in command.params for flag in (*option.opts, *option.secondary_opts)
    }


def texts(node: ast.expr) -> list[str]:
    """The strings that an expression may give, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)]  # type: ignore[misc]
    if isinstance(node, ast.IfExp):
        return texts(node.body) + texts(node.orelse)
    return []


def errors() -> Iterator[tuple[str, str]]:
    """Reasons and fixes of every error in the source that a command can meet: the torch host is Python's alone."""
    for path in (*(ROOT / "cmrc").rglob("*.py"), *(ROOT / "passes").rglob("*.py")):
        if "fx" in path.parts:
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            for keyword in call.keywords:
                if keyword.arg == "fix":
                    yield from (("fix", text) for text in texts(keyword.value))
            if isinstance(call.func, ast.Name) and call.func.id.endswith("Error") and call.args:
                yield from (("reason", text) for text in texts(call.args[0]))


def test_every_flag_of_the_table_is_an_option() -> None:
    assert set(FLAGS.values()) <= options()


def test_every_phrase_is_one_that_an_error_has() -> None:
    source = "".join(path.read_text() for path in (ROOT / "cmrc").rglob("*.py") if path.name != "wording.py")
    assert not [phrase for phrase in PHRASES if phrase not in source]


def test_errors_speak_python_to_python_and_flags_to_the_command_line() -> None:
    seen = set(errors())
    assert len(seen) > 200
    known = options()
    spoken = {text: in_flags(text) if kind == "fix" else reason_in_flags(text) for kind, text in seen}
    wrong = {text for text, words in spoken.items() if PYTHON.search(words)} - ONLY_PYTHON - OF_THE_COMMAND_LINE
    assert not wrong, (
        "the command line would say this in Python's words: spell it as keyword=, or extend cmrc/cli/wording.py"
    )
    assert not {flag for words in spoken.values() for flag in FLAG.findall(words)} - known


def test_the_library_never_speaks_of_flags() -> None:
    outside = [path for path in (ROOT / "cmrc").rglob("*.py") if "cli" not in path.parts]
    for path in outside:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "fix":
                assert not [text for text in texts(node.value) if FLAG.search(text)], path


@pytest.mark.parametrize(
    ("python", "command"),
    [
        ('allow what stays with residue="keep"', "allow what stays with --residue keep"),
        ('calibrate with need=[..., "scatter"]', "calibrate with --need scatter"),
        ("give data=, or stats= and no schedule", "give --data, or --stats and no schedule"),
        ("name other sites (site=), or none", "name other sites (--site), or none"),
        ("give it: sizes={'sequence': 128}", "give it: --size sequence=128"),
        ("`cmrc inspect` or program.sites() lists the names", "`cmrc inspect` lists the names"),
        ("write iia>=0.95", "write iia>=0.95"),
        ("write --budget macs=0.5, or --keep site=0.5", "write --budget macs=0.5, or --keep site=0.5"),
    ],
)
def test_fixes(python: str, command: str) -> None:
    assert in_flags(python) == command


def test_reasons_keep_the_names_of_the_user() -> None:
    assert reason_in_flags("batch=0") == "--batch 0"
    assert reason_in_flags("cannot read data=1/x.npy") == "cannot read data=1/x.npy"
