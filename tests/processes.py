"""A script in two processes that work together, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def torchrun(*options: str) -> list[str]:
    """The start of a command line that runs a script in two processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]


def run_alone_and_together(script: Path, data: str, folder: Path) -> None:
    """Run a script as "one", then as "two" processes, of which one may be killed. It removes its checkpoint when it is done."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for runner, name in (([sys.executable], "one"), (torchrun("--max-restarts", "1"), "two")):
        done = subprocess.run(
            [*runner, str(script), "model.onnx", data, f"{name}.checkpoint", name],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not (folder / f"{name}.checkpoint").exists()
