"""Who may import what: passes only the IR, frameworks only the hosts, and the ONNX path no torch at all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRAMEWORKS = {"torch", "onnx", "onnx_ir", "onnxruntime", "onnxscript"}

STANDARD = {"__future__", "collections", "dataclasses", "enum", "functools", "itertools", "math", "time", "typing"}


def imported(path: Path, *, top_level: bool) -> set[str]:
    """The modules that a file imports; `top_level` leaves out imports inside functions and TYPE_CHECKING blocks."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "passes").rglob("*.py")), ids=lambda p: p.name)
def test_passes_import_only_the_ir(path: Path) -> None:
    ours = {name for name in imported(path, top_level=False) if name.startswith("cmrc")}
    others = {name.split(".")[0] for name in imported(path, top_level=False)} - {"cmrc"}
    assert all(name.startswith(("cmrc.ir", "cmrc.passes")) for name in ours)
    assert others <= {*STANDARD, "numpy"}


@pytest.mark.parametrize("path", sorted((ROOT / "cmrc").glob("*.py")), ids=lambda p: p.name)
def test_only_hosts_import_frameworks(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported(path, top_level=True)} & FRAMEWORKS


@pytest.mark.parametrize(
    "path", [*sorted((ROOT / "cmrc").rglob("*.py")), *sorted((ROOT / "passes").rglob("*.py"))], ids=str
)
def test_only_the_cli_prints(path: Path) -> None:
    calls = [
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    assert path.parent.name == "cli" or "print" not in {
        call.func.id for call in calls if isinstance(call.func, ast.Name)
    }


def test_the_onnx_path_never_imports_torch() -> None:
    script = """
import sys
sys.modules["torch"] = None  # an import of torch would raise
import numpy as np, cmrc, cmrc.cli.app
program = cmrc.trace("examples/digits.onnx")
plan = cmrc.Plan(program).do("act3", units=range(0, 128, 2), constant=0.1)
lowered = cmrc.lower(program, plan)
assert lowered.check([np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype("float32")]).holds
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
