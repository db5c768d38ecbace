"""Whose fault a failure is: a file may hold a model that contradicts itself, and then anything may happen further on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cmrc.errors import CmrcError, GraphError, TraceError
from cmrc.hosts.protocols import Host

FIX = "see what onnx.checker.check_model(model, full_check=True) says, and export the model again"


@contextmanager
def blaming_contradictions(host: Host) -> Iterator[None]:
    """Within: a failure is an error about the model where its own framework refuses the model. Else it is a fault of cmrc.

    The framework is asked only after a failure: many models that it refuses can be read and lowered all the same.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, CmrcError) and not isinstance(error, GraphError):
            raise
        problem = host.contradiction()
        if not problem:
            raise
        node, op = (error.node, error.op) if isinstance(error, GraphError) else ("", "")
        raise TraceError(f"the model contradicts itself: {problem}", node=node, op=op, fix=FIX) from error
