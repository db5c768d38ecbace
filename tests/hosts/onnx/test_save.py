"""Saving: external data, the model that is being read, failures, metadata, large models."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import xxhash
from hosts.onnx.lowering import (
    external,
    lower,
    mlp,
    model,
    put_do,
    random,
)
from onnx import helper

import cmrc
from cmrc.errors import FileError
from cmrc.files import fill
from cmrc.hosts.onnx.host import OnnxHost
from cmrc.hosts.onnx.save import _save_whole
from cmrc.passes import pipeline as passes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def data_of(path: Path) -> str:
    """The one data file that a model refers to."""
    initializers = onnx.load(path, load_external_data=False).graph.initializer
    (name,) = {e.value for tensor in initializers for e in tensor.external_data if e.key == "location"}
    return str(name)


def test_external_data_stays_external_and_mapped(tmp_path: Path) -> None:
    host = OnnxHost.load(external(tmp_path))
    assert isinstance(host.model.graph.initializers["w1"].const_value, onnx_ir.ExternalTensor)
    lowered = lower(host, [random(4, 50)], "a", 1, (3, 4), (5.0, 15.0))
    target = tmp_path / "small.onnx"
    lowered.save(target, lambda: {"cmrc.plan": "text"})
    data = data_of(target)
    assert names(tmp_path) == sorted(["big.onnx", "big.onnx.data", "small.onnx", data])
    weights = onnx.load(target, load_external_data=True).graph.initializer
    digests = [xxhash.xxh3_128_digest(each.raw_data) for each in weights if len(each.raw_data) > 256]
    assert data == f"small.{xxhash.xxh3_128_hexdigest(b''.join(digests))[:16]}.onnx.data"
    again = OnnxHost.load(target)
    assert again.model.metadata_props["cmrc.plan"] == "text"
    np.testing.assert_array_equal(again.run([random(4, 50)])[0], lowered.run([random(4, 50)])[0])


def test_the_name_of_a_data_file_follows_from_every_byte_on_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.random.default_rng(0).bytes(1000)
    files = [content, *(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in (0, 300, 999))]
    sizes, digests = [1, 400, 0, 599], []
    for many in (1 << 28, 0):
        monkeypatch.setattr("cmrc.files.MANY", many)
        for data in files:
            parts = [memoryview(data)[end - size : end] for end, size in zip(np.cumsum(sizes), sizes, strict=True)]
            digests.append(fill(tmp_path / "data", sizes, parts.__getitem__, head=b"head"))
            assert (tmp_path / "data").read_bytes() == b"head" + data
    assert len(set(digests[:4])) == 4
    assert digests[:4] == digests[4:]


def test_what_fails_while_weights_are_written_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(index: int) -> memoryview:
        if index == 2:
            raise ValueError("no number")
        return memoryview(b"1234")

    for many in (1 << 28, 0):
        monkeypatch.setattr("cmrc.files.MANY", many)
        with pytest.raises(ValueError, match="no number"):
            fill(tmp_path / "data", [4] * 8, part)


def test_a_fingerprint_is_the_same_with_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = external(tmp_path)
    alone = cmrc.trace(path).fingerprint
    monkeypatch.setattr("cmrc.ir.fingerprint.MANY", 0)
    assert cmrc.trace(path).fingerprint == alone
    assert len(set(alone.weights.values())) > 1


def test_overwriting_the_model_that_is_being_read_is_safe(tmp_path: Path) -> None:
    path = external(tmp_path)
    x = random(4, 50)
    host = OnnxHost.load(path)
    lowered = host.build(passes.run(put_do(host.graph, "a", 1, (3, 4), (5.0, 15.0))).graph)
    expected = OnnxHost.load(path).run([x])[0], OnnxHost.from_model(lowered.model).run([x])[0]
    with pytest.raises(FileError) as error:
        lowered.save(path)
    assert str(error.value) == (
        f"file: cannot write {path}: the model was loaded from it, and would be overwritten\n"
        "  fix: write to another file, or overwrite it with overwrite=True"
    )
    lowered.save(path, overwrite=True)
    assert names(tmp_path) == sorted(["big.onnx", "big.onnx.data", data_of(path)])  # it is still read here
    np.testing.assert_array_equal(OnnxHost.load(path).run([x])[0], expected[1])
    np.testing.assert_array_equal(host.run([x])[0], expected[0])
    lowered.save(path, overwrite=True)
    np.testing.assert_array_equal(OnnxHost.load(path).run([x])[0], expected[1])
    del host, lowered, error
    gc.collect()
    assert names(tmp_path) == sorted(["big.onnx", data_of(path)])


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cmrc.hosts.onnx.save._save_whole", fail)
    with pytest.raises(FileError, match=r"cannot write .*No space left on device"):
        (host := mlp()).save(path, lambda: {"plan": "p"})
    assert "plan" not in host.model.metadata_props
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_bytes() == b"old"


def test_saving_writes_metadata_that_the_model_in_memory_never_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = helper.make_function("own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)])  # fmt: skip
    proto = model("y = MatMul(x, w)", {"x": ("N", 5)}, "y", w=random(5, 8))
    proto.opset_import.append(helper.make_opsetid("own", 1))
    proto.functions.append(function)
    proto.producer_name, proto.producer_version, proto.domain = "someone", "2", "org.some"
    proto.model_version, proto.doc_string = 7, "what it is"
    onnx.helper.set_model_props(proto, {"own": "1", "source": "before"})
    host, write, seen = OnnxHost.from_model(proto), _save_whole, []

    def watch(*args: Any, **options: Any) -> None:
        seen.append(dict(host.model.metadata_props))
        write(*args, **options)

    monkeypatch.setattr("cmrc.hosts.onnx.save._save_whole", watch)
    host.save(tmp_path / "m.onnx", lambda: {"source": "after", "plan": "p"})
    assert [*seen, dict(host.model.metadata_props)] == [{"own": "1", "source": "before"}] * 2
    saved = onnx.load(tmp_path / "m.onnx")
    assert {p.key: p.value for p in saved.metadata_props} == {"own": "1", "source": "after", "plan": "p"}
    for field in ("producer_name", "producer_version", "domain", "model_version", "doc_string", "ir_version"):
        assert getattr(saved, field) == getattr(proto, field)
    assert list(saved.functions) == list(proto.functions)


def test_a_large_model_runs_and_saves_through_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = mlp()
    expected = host.run([random(4, 5)])[0]
    monkeypatch.setattr("cmrc.hosts.onnx.save.LARGEST", 10)
    again = mlp()
    np.testing.assert_array_equal(again.run([random(4, 5)])[0], expected)
    again.save(tmp_path / "m.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx"]  # nothing in it is worth a file of its own
    big = OnnxHost.from_model(model("y = MatMul(x, w)", {"x": ("N", 50)}, "y", w=random(50, 80)))
    big.save(tmp_path / "b.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["b.onnx", data_of(tmp_path / "b.onnx"), "m.onnx"])
    x = random(4, 50)
    np.testing.assert_array_equal(OnnxHost.load(tmp_path / "b.onnx").run([x])[0], big.run([x])[0])


def test_what_only_the_replaced_model_used_is_removed_and_nothing_else(tmp_path: Path) -> None:
    host = OnnxHost.load(external(tmp_path))
    target = tmp_path / "small.onnx"
    lower(host, [random(4, 50)], "a", 1, (3, 4), (5.0, 15.0)).save(target)
    first = data_of(target)
    shutil.copy(target, tmp_path / "copy.onnx")
    others = ["big.onnx", "big.onnx.data", "copy.onnx"]
    second = lower(host, [random(4, 50)], "a", 1, (5, 6), (5.0, 15.0))
    second.save(target)
    assert names(tmp_path) == sorted([*others, "small.onnx", first, data_of(target)])  # the copy reads the first data
    (tmp_path / "copy.onnx").unlink()
    (tmp_path / "small.other.onnx.data").write_bytes(b"not ours")
    second.save(target)
    assert names(tmp_path) == sorted(
        ["big.onnx", "big.onnx.data", "small.onnx", data_of(target), "small.other.onnx.data"]
    )
    mlp().save(target)
    assert names(tmp_path) == ["big.onnx", "big.onnx.data", "small.onnx", "small.other.onnx.data"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, real = tmp_path / "link.onnx", tmp_path / "real" / "m.onnx"
    link.symlink_to(real)
    mlp().save(link)
    assert link.is_symlink()
    assert real.read_bytes() == link.read_bytes()
    assert names(tmp_path) == ["link.onnx", "real"]
    assert names(real.parent) == ["m.onnx"]
    with pytest.raises(FileError, match="the model was loaded from it"):
        OnnxHost.load(real).save(link)
    big = OnnxHost.load(external(tmp_path))
    with pytest.raises(FileError) as error:
        big.save(link)
    assert str(error.value) == (
        f"file: cannot write {link}: it is a link into another folder, and the model stores its weights in a file beside it\n"
        f"  fix: write to {real}"
    )
    assert names(real.parent) == ["m.onnx"]


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    mlp().save(path)
    path.chmod(0o640)
    mlp().save(path, lambda: {"again": "1"})
    assert path.stat().st_mode & 0o777 == 0o640


def test_external_data_of_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that says less than where it leads is not a link into another folder."""
    external(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    for path in (Path("copy.onnx"), Path("out/copy.onnx")):
        OnnxHost.load("big.onnx").save(path)
        np.testing.assert_array_equal(
            OnnxHost.load(path).run([random(4, 50)])[0], OnnxHost.load("big.onnx").run([random(4, 50)])[0]
        )


def test_what_a_weight_says_of_itself_is_not_declared_again(tmp_path: Path) -> None:
    """onnx_ir declares type and shape of every weight: kilobytes in a small file that had none."""
    given = model(
        "h = MatMul(x, w1)\na = Relu(h)\ny = MatMul(a, w2)", {"x": ("N", 5)}, "y", w1=random(5, 8), w2=random(8, 3)
    )
    onnx.save(given, tmp_path / "model.onnx")
    program = cmrc.trace(tmp_path / "model.onnx")
    cmrc.lower(program, cmrc.Plan(program).do("a", units=[0, 1], constant=0.5)).save(tmp_path / "small.onnx")
    graph = onnx.load(tmp_path / "small.onnx").graph
    assert not {tensor.name for tensor in graph.initializer} & {value.name for value in graph.value_info}
    assert (tmp_path / "small.onnx").stat().st_size < (tmp_path / "model.onnx").stat().st_size + 1024
