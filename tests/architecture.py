"""The shape of the code, measured: python tests/architecture.py

Prints how many modules there are, how they import each other, and which of them one lowering runs through.
"Runs through" counts every module in which any line runs, checks and reports included. "To read" counts what decides about
the do: the modules on the stack while the passes make a node or a tensor of the new graph.
Imports inside functions, imports under TYPE_CHECKING and modules named by a string ("cmrc.program.lower:lower") count
like all others. `test_architecture.py` holds the code to the table of rooms.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import networkx as nx

ROOT = Path(__file__).parents[1]
FRONT = "front"  # cmrc/__init__.py and __main__.py: they gather the public names, and no room imports them


class Import(NamedTuple):
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@cache
def modules() -> dict[str, Path]:
    """Every module by its full name. `passes/` is imported as cmrc.passes; cmrc/passes is a link to it."""
    files = [path for path in (ROOT / "cmrc").rglob("*.py") if "passes" not in path.relative_to(ROOT / "cmrc").parts]
    names = {path: path.relative_to(ROOT) for path in files}
    names |= {path: Path("cmrc") / path.relative_to(ROOT) for path in (ROOT / "passes").rglob("*.py")}
    dotted = {path: ".".join(name.with_suffix("").parts).removesuffix(".__init__") for path, name in names.items()}
    return {name: path for path, name in sorted(dotted.items(), key=lambda item: item[1])}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def room(name: str) -> str:
    """The room of a module: "ir", "hosts.onnx", ..., or its own name for a module beside the rooms."""
    parts = name.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return FRONT
    return ".".join(parts[1:3]) if parts[1] == "hosts" and len(parts) > 2 and _is_package(parts[:3]) else parts[1]


def _is_package(parts: list[str]) -> bool:
    path = modules().get(".".join(parts))
    return path is not None and path.name == "__init__.py"


def imported(name: str, *, at_top: bool = False) -> set[str]:
    """The modules of cmrc that a module names in any way; or only those that it imports as soon as it is imported itself."""
    names: set[str] = set()
    for node in tree(name).body if at_top else ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name}: an import that begins with a dot"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in modules() else node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value.partition(":")[0]
            if re.fullmatch(r"cmrc(\.\w+)+", text) and modules().get(text, Path("__init__.py")).name != "__init__.py":
                names.add(text)
    return (names & modules().keys()) - {name}


@cache
def imports(*, at_top: bool = False) -> frozenset[Import]:
    return frozenset(Import(name, target) for name in modules() for target in imported(name, at_top=at_top))


def graph(edges: Iterable[Import]) -> Any:
    return nx.DiGraph(list(edges))


def cycles(edges: Iterable[Import]) -> list[list[str]]:
    """The sets of modules that reach each other by imports."""
    return sorted(sorted(part) for part in nx.strongly_connected_components(graph(edges)) if len(part) > 1)


def longest_chain(edges: Iterable[Import]) -> list[str]:
    """The longest chain of imports, in files; modules of a cycle count one by one, in no particular order."""
    folded = nx.condensation(graph(edges))
    nx.set_edge_attributes(folded, {(a, b): len(folded.nodes[a]["members"]) for a, b in folded.edges}, "weight")
    # a last node weighs its own members, so it needs an edge behind it
    for node in list(folded.nodes):
        folded.add_edge(node, "end", weight=len(folded.nodes[node]["members"]))
    return [name for node in nx.dag_longest_path(folded)[:-1] for name in sorted(folded.nodes[node]["members"])]


# ---------------------------------------------------------------- what a lowering runs through


class Trail(NamedTuple):
    """The modules of cmrc that some work runs through, which of them calls which, and which of them make the new graph."""

    modules: set[str]
    calls: set[Import]
    makers: set[str]


PIPELINE = ("cmrc.passes.pipeline", "run")  # from here on the do moves
MADE = {"cmrc.ir.graph": {"Node", "Apply"}}  # what a new graph consists of: nodes, and tensors that are expressions


def follow(work: Callable[[], object]) -> Trail:
    """A module counts if one of its functions runs; running a module's body does not."""
    by_file = {str(path.resolve()): name for name, path in modules().items()}
    trail = Trail(set(), set(), set())

    @cache
    def module(file: str) -> str | None:
        return by_file.get(str(Path(file).resolve()))

    def makers(frame: FrameType | None) -> set[str]:
        """The modules on the stack, up to the pipeline; none where the pipeline does not run."""
        names: set[str] = set()
        while frame is not None:
            name = module(frame.f_code.co_filename)
            names |= {name} if name is not None else set()
            if (name, frame.f_code.co_name) == PIPELINE:
                return names
            frame = frame.f_back
        return set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "__init__" and type(frame.f_locals.get("self")) in makers_of:
            trail.makers.update(makers(frame.f_back))
        name = module(frame.f_code.co_filename)
        if event != "call" or name is None or frame.f_code.co_name == "<module>":
            return
        trail.modules.add(name)
        caller = frame.f_back
        while caller is not None and module(caller.f_code.co_filename) is None:  # a library in between
            caller = caller.f_back
        source = None if caller is None else module(caller.f_code.co_filename)
        if source is not None and source != name:
            trail.calls.add(Import(source, name))

    makers_of = {getattr(importlib.import_module(name), each) for name, every in MADE.items() for each in every}
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
    return trail


def mutual(calls: Iterable[Import]) -> list[str]:
    """The pairs of modules that call each other."""
    every = set(calls)
    return sorted(str(call).replace("->", "<->") for call in every if call[::-1] in every and call.source < call.target)


def linear_fold() -> dict[str, Trail]:
    """What one unit of an ONNX model with two linear maps goes through, step by step."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    import cmrc

    random = np.random.default_rng(0)
    weights = {"fc1": (8, 5), "b1": (8,), "fc2": (3, 8), "b2": (3,)}
    proto = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Gemm", ["x", "fc1", "b1"], ["h"], transB=1),
                helper.make_node("Relu", ["h"], ["a"], name="act"),
                helper.make_node("Gemm", ["a", "fc2", "b2"], ["y"], transB=1),
            ],
            "main",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 5])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
            [numpy_helper.from_array(random.normal(size=s).astype("float32"), n) for n, s in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    state: dict[str, Any] = {}

    def trace() -> None:
        state["program"] = cmrc.trace(proto)

    def plan() -> None:
        state["plan"] = cmrc.Plan(state["program"]).do("act", units=[1], constant=0.5)

    def lower() -> None:
        state["lowered"] = cmrc.lower(state["program"], state["plan"])

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            state["lowered"].save(Path(folder) / "small.onnx")

    steps = (trace, plan, lower, save)
    for work in steps:  # once before: the first use of a name imports modules, and the bodies of their classes run
        work()
    return {work.__name__: follow(work) for work in steps}


# ---------------------------------------------------------------- the report


def lines(name: str) -> int:
    return len(modules()[name].read_text(encoding="utf-8").splitlines())


def by_room(names: Iterable[str]) -> str:
    counts = Counter(room(name) for name in names)
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def report(steps: Mapping[str, Trail]) -> Iterator[str]:
    edges = {edge for edge in imports() if room(edge.source) != FRONT}
    inside = [edge for edge in edges if room(edge.source) == room(edge.target)]
    chain = longest_chain(edges)
    yield f"modules                          {len(modules())}"
    yield f"imports inside a room            {len(inside)}"
    yield f"imports across rooms             {len(edges) - len(inside)}"
    yield f"longest chain of imports         {len(chain)}: {' > '.join(n.removeprefix('cmrc.') for n in chain)}"
    yield f"    at the top of modules only   {len(longest_chain(imports(at_top=True)))}"
    loops = cycles(imports())
    yield f"cycles                           {len(loops)}"
    yield from (f"    {', '.join(n.removeprefix('cmrc.') for n in cycle)}" for cycle in loops)
    lowering = steps["lower"].modules
    rewriting = {name for name in lowering if room(name) in ("ir", "passes")}
    yield f"an ONNX lower runs through       {len(lowering)}: {by_room(lowering)}"
    yield f"    of these, in passes and IR   {len(rewriting)}: {', '.join(sorted(n.removeprefix('cmrc.') for n in rewriting))}"
    reading = steps["lower"].makers
    yield f"    to read for the linear fold  {len(reading)}: {', '.join(sorted(n.removeprefix('cmrc.') for n in reading))}"
    every = set[str]().union(*(trail.modules for trail in steps.values()))
    yield f"trace, plan, lower and save      {len(every)}: {by_room(every)}"
    yield f"    lines of a module, mean      {sum(map(lines, every)) // len(every)}"
    pairs = mutual(call for trail in steps.values() for call in trail.calls)
    yield f"    pairs that call each other   {len(pairs)}{': ' if pairs else ''}{', '.join(pairs)}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print("\n".join(report(linear_fold())))  # noqa: T201
