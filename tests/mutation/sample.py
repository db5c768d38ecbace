"""Mutants drawn from the syntax trees of passes and op tables, each run by the tests that execute its lines.

    comparison    a < b to a <= b, == to !=, in to not in       arithmetic    + to -, * to +, // to *, % to //
    number        n to n + 1, True to False                     logic         and to or, `not` left out
    arguments     f(a, b) to f(b, a)                            statement     a call, `x += y` or `x[i] = y` left out
    guard         if a: return b, left out

Left out are texts of messages, annotations, decorators, docstrings and asserts. A mutant is named by its function, the code that it
changes and what that becomes, so that its name outlives a move to another module.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from tests.mutation.explained import EXPLAINED
from tests.mutation.record import Record, tell
from tests.mutation.runner import Ran, run_tests
from tests.mutation.tree import Tree

MODULES = ("passes/**/*.py", "cmrc/ir/*.py", "cmrc/hosts/*/ops/*.py")
NOT_TABLES = ("__init__", "fingerprint", "graph", "text", "verify", "spec", "attributes", "dtypes", "evaluate")
WORDS = ("Declined", "LeftWhole", "Barrier", "Error", "folded", "taken", "past", "TypeVar", "TypeAlias")
AT_IMPORT = {
    "passes": ("tests/passes",),
    "cmrc/ir": ("tests/ir", "tests/passes"),
    "cmrc/hosts/onnx": (
        "tests/hosts/onnx/test_rows.py",
        "tests/hosts/onnx/test_fused.py",
        "tests/hosts/onnx/test_forms.py",
    ),
    "cmrc/hosts/fx": ("tests/differential/test_differential.py", "-k", "fx or torch"),
}
FIRST, MOST = 2.0, 12.0  # seconds of tests, as recorded: the fastest ones, and all if these do not notice
TIMEOUT = 200.0

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """One mutant: a span of a module, and the code that stands there instead."""

    module: str
    function: str
    kind: str
    start: int  # in bytes
    end: int
    lines: range
    before: str
    after: str
    nth: int = 0  # of those that read the same in one function

    @property
    def name(self) -> str:
        number = f" ({self.nth + 1})" if self.nth else ""
        return f"{self.function}: {self.before} -> {self.after}{number}"

    def applied(self, source: bytes) -> str:
        return (source[: self.start] + self.after.encode() + source[self.end :]).decode()


# ---------------------------------------------------------------- drawing


class _Walk(ast.NodeVisitor):
    def __init__(self, module: str, source: bytes) -> None:
        self.module, self.source = module, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.path: list[str] = []
        self.drawn: list[Drawn] = []
        self.alike = Counter[tuple[str, str, str]]()

    def put(self, kind: str, node: Any, after: ast.AST | str) -> None:
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        text = after if isinstance(after, str) else f"({ast.unparse(after)})"
        before = " ".join(ast.unparse(node).split())
        key = (self.function, before, text)
        same = self.alike[key]
        self.alike[key] += 1
        lines = range(node.lineno, node.end_lineno + 1)
        self.drawn.append(Drawn(self.module, self.function, kind, start, end, lines, before, text, same))

    @property
    def function(self) -> str:
        host = [part for part in Path(self.module).parts if part in ("fx", "onnx")]
        return ".".join((*host, Path(self.module).stem, *self.path))

    # ------------------------------------------------------------ where to look

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.path.append(node.name)
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.path.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(isinstance(base, ast.Name) and base.id in ("TypedDict", "Protocol", "Enum") for base in node.bases):
            return
        self.path.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.path.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and "TypeAlias" not in ast.unparse(node.annotation):
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    # ------------------------------------------------------------ what to change

    def visit_If(self, node: ast.If) -> None:
        if len(node.body) == 1 and isinstance(node.body[0], (ast.Return, ast.Continue, ast.Raise)) and not node.orelse:
            self.put("guard", node.test, "False")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.put("statement", node, "pass")
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.put("statement", node, "pass")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, (ast.Subscript, ast.Attribute)) for target in node.targets):
            self.put("statement", node, "pass")
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, operator in enumerate(node.ops):
            if type(operator) in COMPARED:
                changed = copy.deepcopy(node)
                changed.ops[i] = COMPARED[type(operator)]()
                self.put("comparison", node, changed)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in COMPUTED:
            changed = copy.deepcopy(node)
            changed.op = COMPUTED[type(node.op)]()
            self.put("arithmetic", node, changed)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.put("logic", node, changed)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.put("logic", node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.put("number", node, str(not node.value))
        elif isinstance(node.value, int):
            self.put("number", node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called.split(".")[-1].endswith(WORDS):
            return
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        if (
            len(plain) >= 2
            and called not in ("isinstance", "attributes")
            and ast.unparse(plain[0]) != ast.unparse(plain[1])
        ):
            changed = copy.deepcopy(node)
            i, j = node.args.index(plain[0]), node.args.index(plain[1])
            changed.args[i], changed.args[j] = changed.args[j], changed.args[i]
            self.put("arguments", node, changed)
        if called != "isinstance":
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not (isinstance(node.value, ast.Name) and node.value.id in ("tuple", "dict", "list", "set", "Callable")):
            self.generic_visit(node)


def candidates(root: Path) -> list[Drawn]:
    """All mutants of passes and op tables, in the order of the source."""
    drawn: list[Drawn] = []
    for pattern in MODULES:
        for path in sorted(root.glob(pattern)):
            if path.stem in NOT_TABLES:
                continue
            source = path.read_bytes()
            walk = _Walk(path.relative_to(root).as_posix(), source)
            walk.visit(ast.parse(source))
            drawn += walk.drawn
    return drawn


def draw(root: Path, count: int, seed: int) -> list[Drawn]:
    """So many of them, all kinds in turn; of a larger number the first are the same."""
    by_kind: dict[str, list[Drawn]] = {}
    for mutant in candidates(root):
        by_kind.setdefault(mutant.kind, []).append(mutant)
    for kind in sorted(by_kind):
        Random(f"{seed} {kind}").shuffle(by_kind[kind])
    turns = zip_longest(*(by_kind[kind] for kind in sorted(by_kind)))
    return [mutant for turn in turns for mutant in turn if mutant is not None][:count]


# ---------------------------------------------------------------- the tests that execute a line


class Lines:
    """What `tests.mutation.lines` wrote."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text(encoding="utf-8"))
        self.tests: list[dict[str, Any]] = document["tests"]
        self.lines: dict[str, dict[str, list[int]]] = document["lines"]

    def tests_of(self, mutant: Drawn) -> list[dict[str, Any]]:
        """The tests that execute lines of the mutant, the fastest first."""
        by_line = self.lines.get(mutant.module, {})
        numbers = {number for line in mutant.lines for number in by_line.get(str(line), ())}
        return sorted((self.tests[number] for number in numbers), key=lambda test: float(test["seconds"]))


def within(tests: list[dict[str, Any]], seconds: float) -> list[str]:
    """As many tests as fit, at least one."""
    chosen: list[str] = []
    for test in tests:
        seconds -= test["seconds"]
        if seconds < 0 and chosen:
            break
        chosen.append(test["test"])
    return chosen


def run_drawn(mutant: Drawn, lines: Lines, tree: Tree, log: Path) -> Ran:
    """The fastest tests that execute the mutant; all of them if those do not notice it."""
    module = tree.root / mutant.module
    tests = lines.tests_of(mutant)
    selections = [within(tests, FIRST), within(tests, MOST)] if tests else [_at_import(mutant)]
    ran = Ran(True, "", 0, 0.0)
    with tree.changed(module, mutant.applied(module.read_bytes())):
        for selection in selections:
            if ran.ran and len(selection) == len(selections[0]):
                break
            again = run_tests(tree.root, selection, timeout=TIMEOUT, log=log)
            ran = Ran(again.passed, again.failed, again.ran, ran.seconds + again.seconds, again.in_time)
            if not ran.passed:
                break
    return ran


def _at_import(mutant: Drawn) -> list[str]:
    return next(list(tests) for folder, tests in AT_IMPORT.items() if mutant.module.startswith(folder))


def outcomes(options: argparse.Namespace, record: Record, tree: Tree, log: Path) -> Iterator[str]:
    """Run what was drawn; one that is noticed by no test is `explained`, or `survived`."""
    lines = Lines(options.lines)
    for mutant in draw(tree.root, options.sampled, options.seed):
        known = record.data["sampled"].get(mutant.name)
        if known is None or options.again or (known["outcome"] == "survived" and mutant.name not in EXPLAINED):
            ran = run_drawn(mutant, lines, tree, log)
            known = {"outcome": "caught", "by": ran.failed, "kind": mutant.kind, "module": mutant.module,
                     "tests": ran.ran, "seconds": round(ran.seconds, 1)}  # fmt: skip
            if ran.passed or not ran.in_time:
                known["outcome"] = "survived" if ran.passed else "undecided"
        if known["outcome"] != "caught" and mutant.name in EXPLAINED:
            known = {**known, "outcome": "explained", "by": EXPLAINED[mutant.name]}
        record.put("sampled", mutant.name, known)
        tell(f"{mutant.module}  {mutant.name}", known)
        yield known["outcome"]
