"""Changes of a file that know its format, so that most of them get past the parser: `mutate(kind, data, random)`."""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import yaml
from google.protobuf.message import Message

from tests.loaders.samples import BESIDE

Random = random.Random
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 7, 64, 255, 256, 1000, -(2**31), 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30,
    0.5, 1.5, -0.5, 1e-300, 1e308, -1e308, 1e-6, float("nan"), float("inf"),
]  # fmt: skip
TEXTS = [
    "", "x", "y", "act1", "act2", "*", "[", "../x", "/etc/passwd", "0:3,7", "0:200000000", "3:1", "all", "each", "nan", "-0", "1e999",
    "\ud800", "\0", "‖", "a" * 300, "%s%n", "beside", "float32", "constant", "F64", "cmrc-plan-1", "loo",
]  # fmt: skip
KEYS = [
    "do", "made", "model", "scores", "tensors", "format", "units", "axis", "constant", "affine", "site", "value", "tensor",
    "shape", "recipe", "sites", "preset", "keep", "budget", "of", "amount", "seed", "batch", "ridge", "protect", "minimum",
    "multiple_of", "positions", "schedule", "columns", "needs", "count", "samples", "options", "data", "progress", "parents",
    "weight", "bias", "dtype", "data_offsets", "__metadata__", "recompute", "draws", "loss", "objective", "select", "replace",
]  # fmt: skip
YAML_PARTS = [
    "!!python/object/apply:os.system ['false']", "!!binary aGk=", "!!timestamp 2020-01-01", "&a ", "*a", "<<: *a", "? ", "- ",
    "|\n ", ">\n ", "{", "}", "[", "]", ": ", ".nan", ".inf", "0x1F", "0o17", "1_000", "~", "yes", "\t", "---\n", "...\n",
    "!!set {a}", "!!omap [a: 1]", "%YAML 9.9\n", "12:30:45", "\x85", "'", '"',
]  # fmt: skip
DTYPES = [
    "<f4",
    ">f8",
    "<f2",
    "|b1",
    "<i8",
    "|u1",
    "|O",
    "<U4",
    "|S3",
    "<c8",
    "<M8[s]",
    "|V8",
    "<f16",
    [("a", "<f4")],
    "f",
    "",
    3,
]
SHAPES: list[Any] = [
    (), (0,), (24,), (24, 4), (4, 24), (96,), (2, 3, 4, 4), (-1, 4), (10**12, 0), (0, 10**12), (2**62, 2**62), (1.5,), "x", (True, 96), None,
    (1,) * 70, (10**9,),
]  # fmt: skip


def mutate(kind: str, data: bytes, rng: Random) -> bytes:
    """The file with one to four changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = mutate_once(kind, data, rng)
    return data


def mutate_once(kind: str, data: bytes, rng: Random) -> bytes:
    """Mostly a change within the format, sometimes one of bytes, always so where the file is broken already."""
    if rng.random() < 0.15:
        return mutate_bytes(data, rng)
    with contextlib.suppress(Exception):  # the file is broken already
        return FORMATS[kind](data, rng)
    return mutate_bytes(data, rng)


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    length = rng.choice((1, 1, 2, 4, 8, 64))
    change = rng.randrange(5)
    if change == 0:
        return data[:at] + rng.randbytes(length) + data[at + length :]
    if change == 1:
        return data[:at] + data[at + length :]
    if change == 2:
        return data[:at] + data[at : at + length] * 2 + data[at + length :]
    if change == 3:
        return data[:at]
    start = rng.randrange(len(data) + 1)
    return data[:at] + data[start : start + length] + data[at + length :]


# ---------------------------------------------------------------- trees of lists and mappings


def odd(rng: Random) -> Any:
    """A value that may stand anywhere."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice((None, True, False, [], {}, [[]], [0, 1], [True], [1.5], {"a": 1}, {"": []}))
    if kind == 6:
        nested: Any = 0
        for _ in range(rng.choice((3, 70, 400))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    return [odd(rng) for _ in range(rng.randrange(4))]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a tree, with every key of it."""
    stack = [tree]
    while stack:
        container = stack.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            yield container, key
            if isinstance(container[key], (dict, list)):
                stack.append(container[key])


def mutate_tree(tree: Any, rng: Random) -> Any:
    """The tree, changed in place at one of its nodes."""
    known = list(places(tree)) if isinstance(tree, (dict, list)) else []
    if not known or rng.random() < 0.02:
        return odd(rng)
    container, key = rng.choice(known)
    change = rng.randrange(7)
    if change == 0:
        del container[key]
    elif change == 1:
        other, place = rng.choice(known)
        with contextlib.suppress(LookupError):
            container[key] = json.loads(json.dumps(other[place]))
    elif change == 2 and isinstance(container, dict):
        container[rng.choice(KEYS)] = odd(rng) if rng.random() < 0.5 else container[key]
    elif change == 2:
        container.insert(key, odd(rng))
    elif change == 3 and isinstance(container[key], (int, float)):
        container[key] = container[key] + rng.choice((1, -1, 0.5)) if rng.random() < 0.5 else -container[key]
    elif change == 4 and isinstance(container[key], str):
        text = container[key]
        at = rng.randrange(len(text) + 1)
        container[key] = text[:at] + rng.choice((*TEXTS, "0", ":", ",", "9", "=")) + text[at + 1 :]
    else:
        container[key] = odd(rng)
    return tree


def mutate_json(data: bytes, rng: Random) -> bytes:
    text = json.dumps(mutate_tree(json.loads(data), rng))
    if rng.random() < 0.03 and "{" in text:  # a key twice
        text = text.replace("{", '{"do": [], "do": [], ', 1)
    return text.encode()


def mutate_plan(data: bytes, rng: Random) -> bytes:
    text, sign, arrays = data.partition(BESIDE)
    if sign and rng.random() < 0.4:
        return text + sign + mutate_safetensors(arrays, rng)
    return mutate_json(text, rng) + sign + arrays


def mutate_yaml(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.4:
        text = data.decode()
        at = rng.randrange(len(text) + 1)
        return (text[:at] + rng.choice(YAML_PARTS) + text[at + rng.choice((0, 0, 1, 5)) :]).encode()
    tree = mutate_tree(yaml.safe_load(data), rng)
    return (json.dumps(tree) if rng.random() < 0.5 else yaml.safe_dump(tree, allow_unicode=True)).encode()


# ---------------------------------------------------------------- safetensors


def mutate_safetensors(data: bytes, rng: Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, content = json.loads(data[8 : 8 + length]), data[8 + length :]
    metadata = header.get("__metadata__", {})
    change = rng.random()
    if metadata and change < 0.6:  # a JSON document within
        name = rng.choice(list(metadata))
        metadata[name] = json.dumps(mutate_tree(json.loads(metadata[name]), rng))
    elif change < 0.8:
        header = mutate_tree(header, rng)
    elif content:
        at = rng.randrange(len(content) // 8 + 1) * 8
        number = rng.choice([value for value in NUMBERS if isinstance(value, float)] + [0.0, 5e-324, -1.0])
        content = content[:at] + struct.pack("<d", number) * rng.choice((1, 1, 3)) + content[at + 8 :]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


# ---------------------------------------------------------------- protobuf


def messages(message: Message) -> Iterator[Message]:
    stack: list[Message] = [message]
    while stack:
        current = stack.pop()
        yield current
        for field, value in current.ListFields():
            if field.message_type is not None:
                stack.extend(value if _repeated(field) else [value])


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def strings(message: Message) -> list[Any]:
    """Every name in the model: values can be joined otherwise by them."""
    names = []
    for each in messages(message):
        for field, value in each.ListFields():
            if field.type == field.TYPE_STRING:
                names += list(value) if _repeated(field) else [value]
    return names


def scalar(field: Any, rng: Random, names: list[Any]) -> Any:
    if field.type == field.TYPE_STRING:
        return rng.choice(names) if names and rng.random() < 0.7 else rng.choice(TEXTS).replace("\ud800", "?")
    if field.type == field.TYPE_BYTES:
        return rng.choice((b"", b"x", b"constant", b"SAME_UPPER", b"\xff\xfe", rng.randbytes(24)))
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return float(rng.choice(NUMBERS))
    if field.enum_type is not None:
        return rng.choice([value.number for value in field.enum_type.values])
    low, high = (-(2**31), 2**31 - 1) if field.type in (field.TYPE_INT32, field.TYPE_SINT32) else (-(2**63), 2**63 - 1)
    number = rng.choice([value for value in NUMBERS if isinstance(value, int)])
    return max(0 if field.type == field.TYPE_UINT64 else low, min(high, number))


def mutate_proto(message: Message, rng: Random) -> None:
    every = list(messages(message))
    current = rng.choice(every)
    present = [field for field, _ in current.ListFields()]
    field = rng.choice(present) if present and rng.random() < 0.8 else rng.choice(list(current.DESCRIPTOR.fields))
    if field.message_type is not None:
        _mutate_messages(current, field, every, rng)
    elif not _repeated(field):
        if rng.random() < 0.2:
            current.ClearField(field.name)
        else:
            setattr(current, field.name, scalar(field, rng, strings(message)))
    else:
        values = list(getattr(current, field.name))
        at = rng.randrange(len(values) + 1)
        change = rng.randrange(4)
        if change == 0:
            values[at : at + 1] = []
        elif change == 1:
            values.insert(at, scalar(field, rng, strings(message)))
        elif change == 2:
            values[at : at + 1] = [scalar(field, rng, strings(message))]
        else:
            rng.shuffle(values)
        del getattr(current, field.name)[:]
        getattr(current, field.name).extend(values)


def _mutate_messages(current: Message, field: Any, every: list[Message], rng: Random) -> None:
    alike = [each for each in every if each.DESCRIPTOR is field.message_type]
    value = getattr(current, field.name)
    if not _repeated(field):
        if alike and rng.random() < 0.7:
            value.CopyFrom(type(value).FromString(rng.choice(alike).SerializeToString()))
        else:
            current.ClearField(field.name)
        return
    parts = [type(part).FromString(part.SerializeToString()) for part in value]
    change, at = rng.randrange(4), rng.randrange(len(parts) + 1)
    if change == 0:
        parts[at : at + 1] = []
    elif change == 1 and alike:
        chosen = rng.choice(alike)
        parts.insert(at, type(chosen).FromString(chosen.SerializeToString()))
    elif change == 2:
        rng.shuffle(parts)
    else:
        value.add()
        return
    del value[:]
    value.extend(parts)


def mutate_model(data: bytes, rng: Random) -> bytes:
    proto, sign, beside = data.partition(BESIDE)
    if sign and rng.random() < 0.1:
        return proto + sign + mutate_bytes(beside, rng)
    model = onnx.ModelProto.FromString(proto)
    mutate_proto(model, rng)
    return model.SerializeToString() + sign + beside  # type: ignore[no-any-return]


# ---------------------------------------------------------------- arrays


def mutate_npy(data: bytes, rng: Random) -> bytes:
    """Another header, of the same or another length, or other content."""
    if data[:6] != b"\x93NUMPY":
        raise ValueError
    wide = data[6] > 1
    begin = 12 if wide else 10
    (length,) = struct.unpack("<I" if wide else "<H", data[8:begin])
    text, content = data[begin : begin + length].decode("latin1"), data[begin + length :]
    change = rng.randrange(5)
    if change == 0:
        text = _with(text, "shape", rng.choice(SHAPES))
    elif change == 1:
        text = _with(text, "descr", rng.choice(DTYPES))
    elif change == 2:
        text = _with(text, rng.choice(("fortran_order", "extra", "shape")), odd(rng))
    elif change == 3:
        content = mutate_bytes(content, rng)
    else:
        wide = not wide
    header = text.encode("latin1", "replace")
    version = rng.choice((bytes([1 + wide, 0]), bytes([1 + wide, 0]), b"\x03\x00", b"\x01\x01"))
    return b"\x93NUMPY" + version + struct.pack("<I" if wide else "<H", len(header) % 65536) + header + content


def _with(text: str, key: str, value: Any) -> str:
    header = eval(text, {"__builtins__": {}})  # of this file's own making, or it is not a header
    header[key] = value
    return repr(header) + "\n"


def mutate_npz(data: bytes, rng: Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    at, change = rng.randrange(len(members)), rng.randrange(6)
    name, content = members[at]
    if change == 0:
        del members[at]
    elif change == 1:
        members[at] = rng.choice(("x.npy", "labels.npy", "y", "", "a/", "../x.npy", "x" * 300, "\ud7ff")), content
    elif change == 2:
        members.append((rng.choice(("x.npy", "z.npy", name)), content))
    else:
        members[at] = name, mutate_npy(content, rng)
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    ) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def mutate_arrays(data: bytes, rng: Random) -> bytes:
    return mutate_npz(data, rng) if data[:2] == b"PK" else mutate_npy(data, rng)


FORMATS: dict[str, Callable[[bytes, Random], bytes]] = {
    "plan": mutate_plan,
    "stats": mutate_safetensors,
    "recipe": mutate_yaml,
    "model": mutate_model,
    "data": mutate_arrays,
}
