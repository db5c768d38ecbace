"""The package as it is imported: every public name is there, and nothing is loaded before it is used."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import cmrc

HEAVY = ("numpy", "scipy", "networkx", "onnx", "onnx_ir", "onnxruntime", "torch", "yaml")  # typer itself loads pydantic


def test_every_public_name_is_listed_typed_and_reachable() -> None:
    """Type checkers read the imports under TYPE_CHECKING, the interpreter reads the table: both name the same things."""
    tree = ast.parse(Path(cmrc.__file__).read_text())
    (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    homes = {
        alias.name: f"{node.module}.{alias.name}" if alias.name == "diagnose" else f"{node.module}:{alias.name}"
        for node in imports
        for alias in node.names
    }
    assert homes == cmrc._HOMES
    assert sorted(cmrc.__all__) == sorted([*homes, "CmrcError", "__version__"])
    assert set(cmrc.__all__) <= set(dir(cmrc))
    for name in cmrc.__all__:
        assert getattr(cmrc, name) is not None


def test_a_name_that_the_package_lacks() -> None:
    with pytest.raises(AttributeError, match="module 'cmrc' has no attribute 'lowre'"):
        _ = cmrc.lowre


def test_no_module_is_hidden_by_a_name_of_its_package() -> None:
    for info in pkgutil.walk_packages(cmrc.__path__, "cmrc."):
        if info.name.endswith("__main__"):
            continue
        if info.name.startswith("cmrc.integrations.") and find_spec(info.name.rpartition(".")[2]) is None:
            continue  # the tool is not here
        parent, _, name = info.name.rpartition(".")
        module = importlib.import_module(info.name)
        assert isinstance(getattr(importlib.import_module(parent), name), ModuleType), info.name
        assert getattr(importlib.import_module(parent), name) is module
    assert inspect.isfunction(cmrc.plan)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("plan", "--help")])
def test_help_and_version_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    script = f"""
import sys
sys.argv = ["cmrc", *{arguments!r}]
from cmrc.__main__ import main
try:
    main()
finally:
    print("loaded:", *(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "loaded:\n"
    assert done.stdout
