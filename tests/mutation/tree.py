"""A copy of the project in a temporary folder, with at most one changed module in it."""

from __future__ import annotations

import compileall
import contextlib
import importlib.util
import py_compile
import shutil
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = (
    ".git",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    "*.egg-info",
    "build",
    "dist",
)


class Tree:
    """The copy. Its modules are compiled once; a changed one has no compiled form as long as it is changed."""

    def __init__(self, project: Path, folder: Path) -> None:
        self.root = folder / "project"
        shutil.copytree(project, self.root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for part in ("cmrc", "passes", "tests"):
            compileall.compile_dir(self.root / part, quiet=2)

    @contextlib.contextmanager
    def changed(self, module: Path, text: str) -> Iterator[None]:
        """The module (a path within the copy) with another text."""
        before = module.read_text(encoding="utf-8")
        compiled = Path(importlib.util.cache_from_source(str(module)))
        compiled.unlink(missing_ok=True)
        module.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            module.write_text(before, encoding="utf-8")
            py_compile.compile(str(module))
