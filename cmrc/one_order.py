"""Sums that are added up in one order, whatever the number of threads.

OpenBLAS, which numpy and scipy bring along, cuts a product differently for every number of threads, and with it the order in which
terms are added: the last bits differ, and a plan with them. So what cmrc itself computes runs on one of its threads, and large
products are cut into panels of a fixed size, of which several are computed at a time: as many as OpenBLAS had threads. The models
run in their host, with the host's own threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from threadpoolctl import ThreadpoolController

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
PANEL = 256  # columns of a product that one thread computes at a time


class _Hold:
    """How deep the calls are that hold OpenBLAS to one thread, and how many threads each library had before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.before: list[tuple[Any, int]] = []
        self.threads = 1


_HELD = _Hold()


@contextmanager
def one_order() -> Iterator[None]:
    """Hold OpenBLAS to one thread. Also a decorator. Calls may be nested, and made by several threads at once."""
    with _HELD.lock:
        _HELD.depth += 1
        if _HELD.depth == 1:
            _HELD.before = [(library, library.num_threads) for library in _libraries("scipy.linalg" in sys.modules)]
            _HELD.threads = max((count for _, count in _HELD.before), default=1)
            for library, _ in _HELD.before:
                library.set_num_threads(1)
    try:
        yield
    finally:
        with _HELD.lock:
            _HELD.depth -= 1
            if _HELD.depth == 0:
                for library, count in _HELD.before:
                    library.set_num_threads(count)


@cache
def _libraries(scipy: bool) -> list[Any]:
    """The OpenBLAS of numpy, and that of scipy once it is there. One that torch brings belongs to the host."""
    every = ThreadpoolController().lib_controllers
    return [one for one in every if one.internal_api == "openblas" and "torch" not in Path(one.filepath).parts]


def product(left: Array, right: Array) -> Array:
    """leftᵀ right, for rows of the same samples."""
    result = np.empty((left.shape[1], right.shape[1]), dtype=np.result_type(left, right))

    def panel(start: int) -> None:
        some = slice(start, start + PANEL)
        np.matmul(left.T, right[:, some], out=result[:, some])

    _in_threads(panel, right.shape[1])
    return result


def gram(rows: Array) -> Array:
    """rowsᵀ rows: one triangle, and its mirror image."""
    width = rows.shape[1]
    if width <= PANEL:
        return np.asarray(rows.T @ rows)
    result = np.empty((width, width), dtype=rows.dtype)

    def panel(start: int) -> None:
        end = min(start + PANEL, width)
        result[start:, start:end] = rows[:, start:].T @ rows[:, start:end]
        result[start:end, end:] = result[end:, start:end].T

    _in_threads(panel, width)
    return result


def _in_threads(panel: Callable[[int], None], width: int) -> None:
    starts = range(0, width, PANEL)
    with one_order():
        if _HELD.threads == 1 or len(starts) == 1:
            for start in starts:
                panel(start)
            return
        with ThreadPoolExecutor(min(_HELD.threads, len(starts))) as pool:
            list(pool.map(panel, starts))
