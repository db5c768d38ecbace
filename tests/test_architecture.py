"""Which room may import which, no cycle of any kind, one meaning per name, and no decision on prose.

Lists of what is still to be mended are strict: an entry that is no longer true fails, so the lists can only shrink.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from architecture import FRONT, Import, cycles, imports, linear_fold, longest_chain, modules, mutual, report, room, tree

BASE = ("_version", "errors", "files", "one_order", "strict_json")
HOSTS = ("hosts", "hosts.autograd", "hosts.onnx", "hosts.fx")

# What a room may import beside itself. Each row adds the rooms above it.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "_version": (),
    "errors": ("_version",),
    "files": ("_version", "errors"),
    "one_order": (),
    "strict_json": (),
    "ir": BASE,
    "passes": ("ir",),
    "hosts": (*BASE, "ir", "passes"),
    "hosts.autograd": (*BASE, "ir", "hosts"),
    "hosts.onnx": (*BASE, "ir", "passes", "hosts", "hosts.autograd"),
    "hosts.fx": (*BASE, "ir", "passes", "hosts", "hosts.autograd", "hosts.onnx"),  # a torch result is exported to ONNX
    "program": (*BASE, "ir", "passes", *HOSTS),
    "statistics": (*BASE, "ir", "passes", *HOSTS, "program"),
    "verification": (*BASE, "ir", "passes", *HOSTS, "program", "statistics"),
    "recovery": (*BASE, "ir", "passes", *HOSTS, "program", "statistics", "verification"),
    "planning": (*BASE, "ir", "passes", *HOSTS, "program", "statistics", "verification"),
    "reduction": (*BASE, "ir", "passes", *HOSTS, "program", "statistics", "verification", "planning", "recovery"),
    "integrations": ("errors", "reduction"),
    "cli": (
        *BASE,
        "ir",
        "passes",
        *HOSTS,
        "program",
        "statistics",
        "verification",
        "planning",
        "recovery",
        "reduction",
    ),
}

# Still to be mended: imports against the order of rooms, and imports inside a room that close a cycle.
AGAINST_THE_ORDER: set[str] = set()
BACKWARD: set[str] = set()

# Still to be mended: class names that mean two things.
MEAN_TWO_THINGS: set[str] = set()

# Still to be mended: decisions that read the program's own English, and abilities of a host that are guessed.
DECIDED_ON_PROSE: set[str] = set()
GUESSED_CAPABILITIES: set[str] = set()
PROSE = {"detail", "folds", "reason", "why", "fix", "text", "message"}  # attributes that hold sentences


def mended(now: set[str], listed: set[str]) -> str:
    gone = [f"no longer true, take it off the list: {each}" for each in sorted(listed - now)]
    return "\n".join([*gone, *(f"new: {each}" for each in sorted(now - listed))])


def test_every_room_is_in_the_table() -> None:
    assert {room(name) for name in modules()} == {*MAY_IMPORT, FRONT}


def is_allowed(edge: Import) -> bool:
    source, target = room(edge.source), room(edge.target)
    return source == FRONT or target in (source, *MAY_IMPORT[source])


def test_rooms_import_only_what_lies_below_them() -> None:
    against = {str(edge) for edge in imports() if not is_allowed(edge)}
    assert against == AGAINST_THE_ORDER, mended(against, AGAINST_THE_ORDER)


def test_no_module_imports_the_front() -> None:
    assert not [str(edge) for edge in imports() if room(edge.target) == FRONT and edge.source != "cmrc.__main__"]


def test_there_is_no_cycle_of_imports() -> None:
    """Those inside functions, under TYPE_CHECKING and by a string included."""
    listed = {edge for edge in imports() if str(edge) in AGAINST_THE_ORDER | BACKWARD}
    assert cycles(imports() - listed) == []
    loops = [set(cycle) for cycle in cycles(imports())]
    closing = {str(edge) for edge in listed if any({edge.source, edge.target} <= loop for loop in loops)}
    assert closing >= BACKWARD, mended(closing & BACKWARD, BACKWARD)


def test_no_module_is_hidden_by_another_name() -> None:
    for name in modules():
        if name.endswith("__main__") or (room(name) == "integrations" and find_spec(name.rpartition(".")[2]) is None):
            continue  # a program, or a part of a tool that is not here
        importlib.import_module(name)
        parts = name.split(".")
        reached = sys.modules["cmrc"]
        for part in parts[1:]:
            reached = getattr(reached, part)
        assert reached is sys.modules[name], name


def test_a_class_name_means_one_thing() -> None:
    counts = Counter(node.name for name in modules() for node in tree(name).body if isinstance(node, ast.ClassDef))
    twice = {name for name, count in counts.items() if count > 1}
    assert twice == MEAN_TWO_THINGS, mended(twice, MEAN_TWO_THINGS)


def decisions_on_prose(name: str) -> Iterator[str]:
    """`x.detail.startswith(...)` and `"into" in x.detail`: English that the program wrote for people."""
    for node in ast.walk(tree(name)):
        text = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith", "find", "index", "split", "partition"):
                text = node.func.value
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            text = node.comparators[0] if isinstance(node.left, ast.Constant | ast.JoinedStr) else None
        if isinstance(text, ast.Attribute) and text.attr in PROSE:
            yield f"{name}: {ast.unparse(node)}"


def test_nothing_is_decided_on_prose() -> None:
    now = {each for name in modules() for each in decisions_on_prose(name)}
    assert now == DECIDED_ON_PROSE, mended(now, DECIDED_ON_PROSE)


def guessed_capabilities(name: str) -> Iterator[str]:
    """`getattr(host, "module", None)`: what a host can do is asked of its protocols."""
    for node in ast.walk(tree(name)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
            and ast.unparse(node.args[0]).split(".")[-1].strip("_") == "host"
        ):
            yield f"{name}: {ast.unparse(node)}"


def test_capabilities_of_a_host_are_not_guessed() -> None:
    now = {each for name in modules() for each in guessed_capabilities(name)}
    assert now == GUESSED_CAPABILITIES, mended(now, GUESSED_CAPABILITIES)


UNTYPED_READS_IN = ("ir",)  # rooms that may read attributes by name alone: it checks the types


def untyped_reads(name: str) -> Iterator[str]:
    """`node.attrs["axis"]` and `node.attrs.get("axis")`: `attributes(node, LinearAttrs)["axis"]` has a type."""
    for node in ast.walk(tree(name)):
        read = node.value if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            read = node.func.value
        if isinstance(read, ast.Attribute) and read.attr == "attrs":
            yield f"{name}: {ast.unparse(node)}"


def test_attributes_are_read_by_their_types() -> None:
    assert [
        each for name in modules() if not room(name).startswith(UNTYPED_READS_IN) for each in untyped_reads(name)
    ] == []
    assert [*untyped_reads("cmrc.ir.evaluate")]  # it sees them


def test_the_report_counts() -> None:
    steps = linear_fold()
    assert {room(name) for name in steps["lower"].modules} <= {"ir", "passes", "hosts", "hosts.onnx", "program", *BASE}
    assert {"cmrc.program.lower", "cmrc.passes.constant_fold", "cmrc.hosts.onnx.write"} <= steps["lower"].modules
    lines = "\n".join(report(steps))
    assert f"modules                          {len(modules())}\n" in lines
    assert "an ONNX lower runs through" in lines


def test_the_walk_stays_short() -> None:
    """In the flat layout that the rooms replaced it was 18 modules, 28 and 7."""
    steps = linear_fold()
    assert len(steps["lower"].modules) <= 17
    assert len(set[str]().union(*(trail.modules for trail in steps.values()))) <= 27
    assert len(steps["lower"].makers) <= 6


def test_chains_of_imports_stay_short() -> None:
    """In the flat layout they had 32 files, and 22 by imports at the top of modules alone."""
    assert (
        len(longest_chain(imports())) <= 25
    )  # the public names of cmrc/__init__.py are one more than the report counts
    assert len(longest_chain(imports(at_top=True))) <= 21


def test_calls_go_one_way() -> None:
    """Back go only functions that were handed over: the rules, to the driver."""
    calls = {call for trail in linear_fold().values() for call in trail.calls}
    assert mutual(calls) == [
        "cmrc.passes.constant_fold <-> cmrc.passes.rewriting.rewriter",
        "cmrc.passes.dead_subgraph <-> cmrc.passes.rewriting.rewriter",
    ]


def test_pairs_that_call_each_other_are_seen() -> None:
    assert mutual([Import("a", "b"), Import("b", "a"), Import("b", "c")]) == ["a <-> b"]


@pytest.mark.parametrize("loop", [["a", "b"], ["a", "b", "c"]])
def test_a_cycle_is_seen(loop: list[str]) -> None:
    edges = [Import(x, y) for x, y in zip(loop, [*loop[1:], loop[0]], strict=True)]
    assert cycles([*edges, Import("c", "d")]) == [loop]
