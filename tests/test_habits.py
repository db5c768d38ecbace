"""Files about the project agree with each other: versions, bounds, packages, workflows, and messages of commits."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cmrc import __version__

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
complaints: Callable[[str], list[str]] = runpy.run_path(str(ROOT / ".ci" / "commit-msg"))["complaints"]


def pins(name: str) -> dict[str, str]:
    lines = (line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#"))
    return {plain(package): version for package, version in (line.split("==") for line in lines)}


def plain(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def bounds(*extras: str) -> dict[str, str]:
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in extras:
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    return {plain(package): version for package, version in (line.split(">=") for line in wanted if ">=" in line)}


def numbers(version: str) -> tuple[int, ...]:
    parts = [int(part) for part in version.split("+")[0].split(".")]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def test_the_lowest_versions_are_those_that_the_package_allows() -> None:
    dev = {name: version for name, version in bounds("dev").items() if name in ("hypothesis", "pytest")}
    allowed = {**bounds("cpu", "plot"), **dev}
    lowest = pins("constraints-lowest.txt")
    assert lowest.pop("pyparsing")  # as the file says
    assert lowest.keys() == allowed.keys()
    assert {n: numbers(v) for n, v in lowest.items()} == {n: numbers(v) for n, v in allowed.items()}


def test_the_pinned_versions_are_allowed() -> None:
    pinned = pins("constraints.txt")
    allowed = bounds("torch", "cpu", "dev", "plot", "bench")
    assert not allowed.keys() - pinned.keys()
    assert not [name for name, lowest in allowed.items() if numbers(pinned[name]) < numbers(lowest)]


def test_every_package_is_installed() -> None:
    folders = {path.parent for top in ("cmrc", "passes") for path in (ROOT / top).rglob("__init__.py")}
    names = {".".join(folder.relative_to(ROOT).parts) for folder in folders if "cmrc/passes" not in folder.as_posix()}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert {name if name.startswith("cmrc") else f"cmrc.{name}" for name in names} == set(listed)


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]


def test_the_changelog_has_the_version() -> None:
    assert re.search(rf"^## {re.escape(__version__)} \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_workflow_runs_what_people_run() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = {step["run"] for job in jobs.values() for step in job["steps"] if "run" in step}
    tool = "bash .ci/integrations ${{ matrix.tool }}"
    assert commands == {"bash .ci/run", "bash .ci/types", "bash .ci/core", "bash .ci/lowest", tool}
    listed = re.search(r"# Names: ([\w ]+)\.", (ROOT / ".ci" / "integrations").read_text())
    assert listed is not None
    assert jobs["integrations"]["strategy"]["matrix"]["tool"] == listed[1].split()
    assert all((ROOT / command.split()[1]).exists() for command in commands)
    tried = {jobs["all"]["steps"][1]["with"]["python-version"], *jobs["core"]["strategy"]["matrix"]["python"]}
    claimed = {re.search(r":: (3\.\d+)$", each) for each in PROJECT["project"]["classifiers"]}
    assert {match[1] for match in claimed if match} == tried


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_the_forms_can_be_read(form: Path) -> None:
    assert yaml.safe_load(form.read_text())


@pytest.mark.parametrize(
    "message",
    [
        "Sink constants through average pooling",
        "Add a row for Mish\n\nIt was opaque before.\n",
        "Bring back the old order\n# a comment.\n",
        'Revert "Adds a row."',
        "\nFix the sign of a bias\n\n# ------------------------ >8 ------------------------\ndiff --git a b.",
    ],
)
def test_a_good_message_passes(message: str) -> None:
    assert complaints(message) == []


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("", "the message is empty"),
        ("# only a comment", "the message is empty"),
        ("Add " + "x" * 69, "the subject has 73 characters: at most 72"),
        ("Add a row for Mish.", "the subject ends with a full stop: leave it out"),
        ("add a row for Mish", "the subject begins with 'add': a capital letter first"),
        ("Add a row\nfor Mish", "the second line is not blank: it parts the subject from the body"),
        *(
            (f"{word} a row", f"the subject begins with '{word}': say what the commit does, as an order ('Add', 'Fix', 'Split')")
            for word in ("Added", "Adds", "Adding", "What", "The", "WIP:")
        ),
    ],
)  # fmt: skip
def test_a_bad_message_is_named(message: str, complaint: str) -> None:
    assert complaints(message) == [complaint]
