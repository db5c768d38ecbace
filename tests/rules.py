"""What the tests of a pass share: run it on one example, and find every reason for which its source can decline."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from types import ModuleType

from graphs import batch
from meaning import gap, outputs_of
from tolerances import EXACT_F64

from cmrc.ir.graph import Graph
from cmrc.ir.text import to_text
from cmrc.ir.verify import verify_graph
from cmrc.passes.rewriting.contract import SHARED
from cmrc.passes.rewriting.rewriter import Log

BESIDE = (
    "%{} is replaced in these units, %{} is not: replace both (`cmrc inspect --groups` shows what belongs together)"
)

Pass = Callable[[Graph, Log], tuple[Graph, bool]]
SIZES = {"N": 2, "H": 5, "W": 4, "T": 4}


def rewritten(run: Pass, graph: Graph) -> Graph:
    """The graph after a pass that changes it, leaves its input alone, keeps its meaning, and then is done."""
    before = to_text(graph)
    verify_graph(graph)
    after, changed = run(graph, Log())
    verify_graph(after)
    assert changed
    assert to_text(graph) == before
    inputs = batch(graph, **SIZES)
    assert gap(outputs_of(after, inputs), outputs_of(graph, inputs)) <= EXACT_F64
    return after


def before_and_after(name: str, run: Pass, graph: Graph) -> str:
    """For people and golden files: numbers to six digits, for the last ones differ between machines."""
    text = f"{to_text(graph, data=False)}\n; {name} ->\n\n{to_text(rewritten(run, graph), data=False)}"
    return re.sub(r"-?\d+\.\d+(?:e[+-]?\d+)?", lambda number: f"{float(number[0]):.6g}", text)


def reasons(run: Pass, graph: Graph, *, moves: bool = False) -> set[str]:
    """Why a pass stopped. The graph stays as it was, unless something else in it `moves`."""
    log = Log()
    verify_graph(graph)
    after, changed = run(graph, log)
    verify_graph(after)
    assert changed == moves
    assert (to_text(after) != to_text(graph)) == moves
    return set(log.reasons.values())


def declared(module: ModuleType) -> list[str]:
    """A pattern for each `Declined(...)` in a module's source whose text stands there."""
    problems: list[str] = []
    for call in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "Declined":
            continue
        for part in ast.walk(call.args[0]):
            if isinstance(part, ast.JoinedStr):
                texts = [re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".*" for v in part.values]
                problems.append("".join(texts))
            elif isinstance(part, ast.Name) and part.id.isupper():
                problems.append(re.escape(getattr(module, part.id)))
        if isinstance(call.args[0], ast.Constant):
            problems.append(re.escape(str(call.args[0].value)))
    return sorted(set(problems))


RISING = {
    "the statistics of a group need all of its units: only whole groups can go",
    SHARED,
    "it counts positions from the first query",
}  # reasons of contract.py and norms.py that test_dead_subgraph.py reaches


def untested(module: ModuleType, tested: set[str]) -> list[str]:
    """The reasons in a module's source that no test reaches."""
    return [pattern for pattern in declared(module) if not any(re.fullmatch(pattern, reason) for reason in tested)]
