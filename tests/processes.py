"""Two processes that work together, as torchrun starts them."""

from __future__ import annotations

import sys


def torchrun(*options: str) -> list[str]:
    """The start of a command line that runs a script in two processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
