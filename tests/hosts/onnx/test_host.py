"""The ONNX host: loading files and what is wrong with them, annotations, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx_ir
import pytest
from hosts.onnx.lowering import (
    external,
    mlp,
)

from cmrc.errors import CmrcError, HostError, TraceError
from cmrc.hosts.onnx.host import OnnxHost


def test_annotations_are_kept_in_order_and_dropped_by_build(tmp_path: Path) -> None:
    host = mlp()
    entries = [("a", {"units": [1], "n": 0}), ("x", {"units": [2], "n": 1}), ("a", {"units": [3], "n": 2})]
    marked = host.annotate(entries)
    assert marked.annotations() == [entry for _, entry in entries]
    assert host.annotations() == []
    relu = next(node for node in marked.model.graph if node.op_type == "Relu")
    assert json.loads(relu.metadata_props["cmrc.do"]) == [[0, "a", entries[0][1]], [2, "a", entries[2][1]]]
    marked.save(tmp_path / "m.onnx")
    again = OnnxHost.load(tmp_path / "m.onnx")
    assert again.annotations() == [entry for _, entry in entries]
    assert again.build(again.graph).annotations() == []
    with pytest.raises(HostError, match="no such value to annotate"):
        host.annotate([("nothing", {})])


def message(error: pytest.ExceptionInfo[CmrcError], tmp_path: Path) -> str:
    return str(error.value).replace(str(tmp_path), "...")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        OnnxHost.load(tmp_path / "none.onnx")
    assert message(error, tmp_path) == (
        "trace: cannot read .../none.onnx: there is no such file\n  fix: give the path of an .onnx file"
    )


@pytest.mark.parametrize("content", [b"not a model at all", b"", b"\x08\x08\x12"])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "odd.onnx").write_bytes(content)
    with pytest.raises(
        TraceError, match=r"cannot read .*odd\.onnx: it (is not an ONNX model, or it is cut off|holds no ONNX graph)"
    ):
        OnnxHost.load(tmp_path / "odd.onnx")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    whole = onnx_ir.to_proto(mlp().model).SerializeToString()
    (tmp_path / "cut.onnx").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TraceError) as error:
        OnnxHost.load(tmp_path / "cut.onnx")
    assert message(error, tmp_path) == (
        "trace: cannot read .../cut.onnx: it is not an ONNX model, or it is cut off\n"
        "  fix: export or download it again; an .onnx file is a serialised ModelProto"
    )


def test_missing_or_short_external_data(tmp_path: Path) -> None:
    path = external(tmp_path)
    data = tmp_path / "big.onnx.data"
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(TraceError, match=r"external data file .*big\.onnx\.data is cut off: 1000 bytes"):
        OnnxHost.load(path)
    data.unlink()
    with pytest.raises(TraceError, match=r"external data file .*big\.onnx\.data does not exist"):
        OnnxHost.load(path)


def test_the_path_never_imports_torch(tmp_path: Path) -> None:
    mlp().save(tmp_path / "m.onnx")
    script = f"""
import sys
from cmrc.passes import pipeline as passes
from cmrc.hosts.onnx.host import OnnxHost
host = OnnxHost.load({str(tmp_path / "m.onnx")!r})
assert "onnxruntime" not in sys.modules
host.build(passes.run(host.graph).graph).save({str(tmp_path / "n.onnx")!r})
import numpy
host.run([numpy.ones((1, 5), numpy.float32)])
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
