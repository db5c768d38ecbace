"""Random inputs of the declared types and shapes, with dynamic sizes given by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cmrc.errors import InputError
from cmrc.ir.graph import Array, Value, numpy_dtype


def require_known(sizes: Mapping[str, int], values: Sequence[Value]) -> None:
    """Require that these names are dynamic sizes of some input: a misspelt one would be ignored."""
    known = sorted({str(n) for value in values for n in value.shape if not isinstance(n, int)})
    for name in sizes:
        if name not in known:
            raise InputError(
                f"no input has a size {name!r}",
                fix=f"the dynamic sizes are {', '.join(known)}" if known else "every size of its inputs is fixed",
            )


def random_inputs(
    values: Sequence[Value], sizes: Mapping[str, int], seed: int, *, default: int | None = 2
) -> dict[str, Array]:
    """Standard normal numbers; zeros and ones if the input has whole numbers, since every table has rows of these indices.

    A size that is not given is `default`, or an error if that is None.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for value in values:
        shape = []
        for number in value.shape:
            known = number if isinstance(number, int) else sizes.get(str(number), default)
            if known is None:
                raise InputError(
                    f"the size {str(number)!r} of input {value.name!r} is known only at run time",
                    fix=f"give it: sizes={{{str(number)!r}: 128}}",
                )
            shape.append(known)
        floating = value.dtype.startswith(("float", "bfloat"))
        drawn = rng.normal(size=shape) if floating else rng.integers(0, 2, size=shape)
        arrays[value.name] = drawn.astype(numpy_dtype(value.dtype))
    return arrays
