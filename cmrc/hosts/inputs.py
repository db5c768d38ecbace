"""Random inputs of the declared types and shapes, with dynamic sizes given by name; and batches with which a model runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cmrc.errors import InputError
from cmrc.hosts.protocols import Host
from cmrc.ir.graph import Array, Value, numpy_dtype

BATCHES = 3
SIZES = (2, 8, 32, 64, 224)  # for dynamic sizes: the first with which the model runs
SCALES = (-1.0, 1.0)  # powers of ten


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


def random_batches(
    host: Host, *, sizes: Mapping[str, int] | None = None, seed: int = 0, count: int = BATCHES
) -> list[dict[str, Array]]:
    """Batches of the declared types and shapes. Dynamic sizes that are not given, and scales, are drawn from the seed.

    The model runs with every batch that is returned: sizes are tried from small to large.
    """
    values = host.graph.inputs
    if {value.name for value in values} != set(host.inputs):
        raise InputError(
            "random inputs cannot be made for a model with nested or constant arguments",
            fix="give batches: lowered.check((batch,))",
        )
    given = dict(sizes or {})
    rng = np.random.default_rng(seed)
    start, batch = _first_that_runs(host, values, given, seed)
    batches = [batch]
    dynamic = sorted({str(n) for value in values for n in value.shape if not isinstance(n, int)} - given.keys())
    for i in range(1, count):
        drawn = {name: int(rng.integers(1, 2 * start)) if name in _leading(values) else start for name in dynamic}
        batch = random_inputs(values, {**drawn, **given}, seed + i, default=start)
        if not _runs(host, batch):
            batch = random_inputs(values, given, seed + i, default=start)
        scale = 10.0 ** rng.uniform(*SCALES)
        batches.append({name: _scaled(array, scale) for name, array in batch.items()})
    return batches


def _leading(values: Sequence[Value]) -> set[str]:
    """The dynamic sizes of first axes: numbers of samples, which a model takes at any size."""
    return {str(value.shape[0]) for value in values if value.shape}


def _first_that_runs(
    host: Host, values: Sequence[Value], given: Mapping[str, int], seed: int
) -> tuple[int, dict[str, Array]]:
    for size in SIZES:
        batch = random_inputs(values, given, seed, default=size)
        if _runs(host, batch):
            return size, batch
    raise InputError(
        f"the model does not run on random inputs with dynamic sizes of {', '.join(map(str, SIZES))}",
        fix="give batches: lowered.check((batch,))",
    )


def _runs(host: Host, batch: Mapping[str, Array]) -> bool:
    try:
        host.run(batch)
    except Exception:  # every framework raises different errors for sizes that do not fit
        return False
    return True


def _scaled(array: Array, scale: float) -> Array:
    floating = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    return (array * np.asarray(scale, array.dtype)).astype(array.dtype) if floating else array
