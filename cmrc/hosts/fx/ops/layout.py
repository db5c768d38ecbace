"""Rows of ops that move positions: reshape, transpose, concat, expand, slices and splits."""

from __future__ import annotations

from collections.abc import Sequence

from cmrc.hosts.fx.ops.row import Read, along, row
from cmrc.hosts.fx.schema import Arguments, opname
from cmrc.ir.graph import Marks

LAST = 2**62  # export writes an open end of a slice as the largest integer


@row("flatten.using_ints", "squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze", "view_as", "reshape_as")
def read_derived_reshape(_: Arguments) -> Read:
    """The sizes follow from the operands."""
    return Read("reshape", (0,))


@row("view", "_unsafe_view")
def read_view(_: Arguments) -> Read:
    return Read("reshape", (0,), sizes="size")


@row("reshape")
def read_reshape(_: Arguments) -> Read:
    return Read("reshape", (0,), sizes="shape")


@row("unflatten.int")
def read_unflatten(a: Arguments) -> Read:
    return Read("reshape", (0,), sizes="sizes", first=a.axis("dim"))


@row("expand", "broadcast_to")
def read_expand(_: Arguments) -> Read:
    return Read("expand", (0,), sizes="size")


@row("expand_as")
def read_expand_as(_: Arguments) -> Read:
    return Read("expand", (0,))


@row("full")
def read_full(a: Arguments) -> Read | None:
    """A number at every position of a size: floats only, for whole numbers are positions and counts."""
    return Read("expand", (1,), sizes="size") if a.node.meta["val"].dtype.is_floating_point else None


@row("permute")
def read_permute(a: Arguments) -> Read:
    return Read("transpose", (0,), {"perm": a.axes("dims")})


@row("transpose.int", "swapaxes", "swapdims")
def read_transpose(a: Arguments) -> Read:
    perm = list(range(a.rank()))
    i, j = a.axis(1), a.axis(2)  # called dim0 and dim1, or axis0 and axis1
    perm[i], perm[j] = perm[j], perm[i]
    return Read("transpose", (0,), {"perm": tuple(perm)})


@row("t", "numpy_T")
def read_t(a: Arguments) -> Read:
    return Read("transpose", (0,), {"perm": tuple(range(a.rank()))[::-1]})


@row("mT")
def read_matrix_t(a: Arguments) -> Read:
    perm = tuple(range(a.rank()))
    return Read("transpose", (0,), {"perm": (*perm[:-2], perm[-1], perm[-2])})


@row("movedim.int", "movedim.intlist")
def read_movedim(a: Arguments) -> Read:
    moved = dict(zip(a.axes("destination"), a.axes("source"), strict=True))
    rest = iter([d for d in range(a.rank()) if d not in moved.values()])
    return Read("transpose", (0,), {"perm": tuple(moved[d] if d in moved else next(rest) for d in range(a.rank()))})


@row("cat", "concat")
def read_concat(a: Arguments) -> Read:
    rank = len(a.out_shape())
    # Next to others, torch also takes vectors of no numbers, which a cache begins with.
    joined = [i for i, part in enumerate(a["tensors"]) if rank == 1 or tuple(part.meta["val"].shape) != (0,)]
    return Read("concat", tuple((0, i) for i in joined), {"axis": int(a["dim"]) % rank})


@row("slice.Tensor")
def read_slice(a: Arguments) -> Read:
    axis, start, end, step = a.axis("dim"), a["start"], a["end"], a["step"]
    size = a.shape(0)[axis]
    if start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= LAST)):
        return Read("pointwise", (0,), {"fn": "identity"})
    if not all(isinstance(v, int) or v is None for v in (size, start, end, step)):
        return along("slice", (axis,))
    keep = tuple(range(*slice(start, end, step).indices(int(size))))
    return Read("select", (0,), {"axis": axis, "keep": keep}) if keep else along("slice", (axis,))


@row("narrow")
def read_narrow(a: Arguments) -> Read:
    axis, start, length = a.axis("dim"), a["start"], a["length"]
    size = a.shape(0)[axis]
    if not isinstance(start, int) or not isinstance(length, int) or not isinstance(size, int):
        return along("slice", (axis,))
    return Read("select", (0,), {"axis": axis, "keep": tuple(range(start % size, start % size + length))})


@row("split_with_sizes")
def read_split_with_sizes(a: Arguments) -> Read | None:
    return _sized_parts(a, a["split_sizes"])


@row("split.sizes")
def read_split_sizes(a: Arguments) -> Read | None:
    return _sized_parts(a, a["split_size"])


def _sized_parts(a: Arguments, sizes: Sequence[object]) -> Read | None:
    known = [n for n in sizes if isinstance(n, int)]
    if len(known) < len(sizes) or not isinstance(a.shape(0)[a.axis("dim")], int):
        return None
    return _parts(a.axis("dim"), known)


@row("split.Tensor", "chunk")
def read_split(a: Arguments) -> Read | None:
    axis = a.axis("dim")
    size = a.shape(0)[axis]
    if not isinstance(size, int):
        return None
    each = -(-size // int(a["chunks"])) if opname(a.node) == "chunk" else int(a["split_size"])
    return _parts(axis, [min(each, size - start) for start in range(0, size, each)])


def _parts(axis: int, sizes: Sequence[int]) -> Read | None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = tuple({"axis": axis, "keep": tuple(range(s, s + n))} for s, n in zip(starts, sizes, strict=True))
    return Read("select", (0,), parts=parts) if parts else None


@row("sym_size.int")
def read_sym_size(a: Arguments) -> Read:
    return Read("opaque", (0,), marks=Marks(shape_only=(a["dim"] % a.rank(),)))
