"""Errors that come out of onnx_ir wrapped, several times over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cmrc.errors import CmrcError


def causes(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and so on to the first."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain


def last_line(error: BaseException) -> str:
    """The innermost cause of an error, in a line."""
    first = causes(error)[-1]
    lines = str(first).strip().splitlines()
    return lines[-1] if lines else type(first).__name__


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """A fold that is refused while onnx_ir writes a model is reported as that, not as a failure to write."""
    try:
        yield
    except Exception as error:
        own = next((cause for cause in causes(error) if isinstance(cause, CmrcError)), None)
        if own is None or own is error:
            raise
        raise own from None
