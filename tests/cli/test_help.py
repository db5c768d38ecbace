"""Help: every command, its examples and its options, and the version."""

from __future__ import annotations

import re
import shlex

import pytest
from command import cli

import cmrc
from cmrc.cli.app import Commands
from cmrc.cli.lazy import LazyGroup, load
from cmrc.cli.plan import MakeOrRead
from cmrc.cli.reduce import ReduceCommand


def test_help_and_version() -> None:
    assert "make" in cli("plan", "--help").stdout
    assert cli("--version").stdout.strip() == cmrc.__version__
    for command in ((), ("inspect",), ("lower",), ("check",), ("annotate",), ("plan", "show")):
        shown = cli(*command, "--help")
        assert shown.exit_code == 0
        assert "Usage" in shown.stdout


def test_the_options_of_reduce_stand_in_sections() -> None:
    names = [name for group in ReduceCommand.sections.values() for name in group]
    own = {parameter.name: parameter for parameter in load(Commands.entries["reduce"]).params}
    assert set(names) <= set(own)
    assert len(names) == len(set(names))
    shown = cli("reduce", "--help").stdout
    titles = ["Arguments:", *(f"{title}:" for title in ReduceCommand.sections), "Other options:"]
    assert [line for line in shown.splitlines() if line in titles] == titles
    goals = shown[shown.index("Goals (they combine):") : shown.index("Instead of a goal:")]
    assert "--speedup" in goals
    assert "--keep" not in goals
    assert all(parameter.opts[-1] in shown for parameter in own.values() if parameter.param_type_name == "option")


def test_plan_and_reduce_share_their_options() -> None:
    """The same name, the same short text; where a command takes more or less, the text goes on."""
    plan, reduce = (
        {o.name: o for o in load(entry).params} for entry in (MakeOrRead.entries["make"], Commands.entries["reduce"])
    )
    shared = {"output", "data", "held_out", "sites", "protect", "preset", "keep", "delta", "batch", "seed", "force"}
    assert shared <= set(plan) & set(reduce)
    assert set(plan) & set(reduce) - shared <= {"model", "as_json", "quiet", "verbose", "help"}
    for name in shared:
        assert plan[name].opts == reduce[name].opts, name
        first = [re.split("[.:,;]", option[name].help)[0] for option in (plan, reduce)]
        assert first[0] == first[1], name


def test_the_list_of_commands_is_not_cut() -> None:
    assert "..." not in re.sub(
        r"cmrc plan MODEL \.\.\.", "", cli("--help").stdout.split("Commands:")[1].split("Examples:")[0]
    )


@pytest.mark.parametrize("group", [Commands, MakeOrRead])
def test_every_command_has_two_examples_that_parse(group: type[LazyGroup]) -> None:
    """The examples of the help are commands with options that exist."""
    for name, entry in group.entries.items():
        if name == "plan":
            continue
        lines = re.findall(r"^  cmrc (.+)$", load(entry).epilog, re.MULTILINE)
        assert len(lines) >= 2, name
        for line in lines:
            word, *rest = shlex.split(line)
            entries = Commands.entries
            if word == "plan":
                word = rest.pop(0) if rest[0] in MakeOrRead.entries else "make"
                entries = MakeOrRead.entries
            command = load(entries[word])
            context = command.make_context(word, list(rest), resilient_parsing=False)
            assert context.params


@pytest.mark.parametrize("group", [Commands, MakeOrRead])
def test_every_command_is_listed_by_the_line_that_its_own_help_begins_with(group: type[LazyGroup]) -> None:
    for name, entry in group.entries.items():
        assert load(entry).help.startswith(entry.summary.rstrip(".")), name
