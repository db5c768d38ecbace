"""Files that say anything: every one is refused with the node, the reason and the way out, and none reads other files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hosts.onnx.lowering import external, lower, model, random
from onnx import TensorProto, helper

import cmrc
from cmrc.errors import GraphError, HostError, ResidueError, TraceError
from cmrc.hosts.onnx.host import OnnxHost
from cmrc.program.program import blaming_contradictions

CHECK = "\n  fix: see what onnx.checker.check_model(model) says, and export the model again"
BESIDE = (
    "\n  fix: put the data file into the folder of the model, and let the model name it by a path inside that folder"
)
Change = Callable[[onnx.ModelProto], None]


def conv() -> onnx.ModelProto:
    """x -> Conv -> Relu -> y."""
    return model("h = Conv<group = 1>(x, w)\ny = Relu(h)", {"x": ("N", 3, 8, 8)}, "y", w=random(4, 3, 3, 3))


def refused(proto: onnx.ModelProto, folder: Path) -> str:
    """What is said of a model in memory, and in a file."""
    texts = []
    onnx.save(proto, folder / "m.onnx")
    for ask in (lambda: OnnxHost.from_model(proto).graph, lambda: OnnxHost.load(folder / "m.onnx").graph):
        with pytest.raises(TraceError) as error:
            ask()
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    return texts[0]


def set_attribute(proto: onnx.ModelProto, name: str, value: object) -> None:
    node = proto.graph.node[0]
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def set_weight(proto: onnx.ModelProto, **fields: object) -> None:
    tensor = proto.graph.initializer[0]
    for field, value in fields.items():
        tensor.ClearField(field)
        if isinstance(value, list):
            getattr(tensor, field).extend(value)
        elif value is not None:
            setattr(tensor, field, value)


NEWEST, OPSET = onnx.IR_VERSION, onnx.defs.onnx_opset_version()
UPGRADE = "\n  fix: pip install -U onnx, or export the model again"
CASES: dict[str, tuple[Change, str]] = {
    "negative opset": (
        lambda m: setattr(m.opset_import[0], "version", -3),
        f"trace: the model has opset -3 of the domain ''{CHECK}",
    ),
    "too many outputs": (
        lambda m: m.graph.node[1].output.append("z"),
        f"trace: %y (Relu): it has 2 outputs, which the op does not allow{CHECK}",
    ),
    "no type of numbers": (
        lambda m: set_weight(m, data_type=0),
        f"trace: %w (initializer): its data type is not given{CHECK}",
    ),
    "ir version": (
        lambda m: setattr(m, "ir_version", 999),
        f"trace: the model has IR version 999, and the installed onnx knows those up to {NEWEST}{UPGRADE}",
    ),
    "opset": (
        lambda m: setattr(m.opset_import[0], "version", 999),
        f"trace: the model has opset 999, and the installed onnx knows those up to {OPSET}{UPGRADE}",
    ),
    "input of a node": (
        lambda m: m.graph.node[1].input.__setitem__(0, "nothing"),
        f"trace: %y (Relu): it reads 'nothing', but no node, input or initializer has that name{CHECK}",
    ),
    "output of the model": (
        lambda m: setattr(m.graph.output[0], "name", "nothing"),
        f"trace: %nothing (output): no node, input or initializer has that name{CHECK}",
    ),
    "attribute of another type": (
        lambda m: set_attribute(m, "group", 1.5),
        f"trace: %h (Conv): its attribute 'group' is of type FLOAT, but the op has INT{CHECK}",
    ),
    "attribute that is a list": (
        lambda m: set_attribute(m, "auto_pad", [1, 2]),
        f"trace: %h (Conv): its attribute 'auto_pad' is of type INTS, but the op has STRING{CHECK}",
    ),
    "too few inputs": (
        lambda m: m.graph.node[0].input.pop() and None,
        f"trace: %h (Conv): it has 1 inputs, but the op takes 2 to 3{CHECK}",
    ),
    "short data": (
        lambda m: set_weight(m, raw_data=m.graph.initializer[0].raw_data[:10]),
        f"trace: %w (initializer): it has 10 bytes of data, but its shape [4, 3, 3, 3] needs 432{CHECK}",
    ),
    "long data": (
        lambda m: set_weight(m, raw_data=m.graph.initializer[0].raw_data + b"1234"),
        f"trace: %w (initializer): it has 436 bytes of data, but its shape [4, 3, 3, 3] needs 432{CHECK}",
    ),
    "huge": (
        lambda m: set_weight(m, dims=[2**40, 2**40, 3, 3]),
        f"trace: %w (initializer): it has 432 bytes of data, but its shape [{2**40}, {2**40}, 3, 3] needs {36 * 2**80}{CHECK}",
    ),
    "huge, in a list": (
        lambda m: set_weight(m, dims=[2**40, 3, 3, 3], raw_data=None, float_data=[1.0]),
        f"trace: %w (initializer): its data do not match its shape [{2**40}, 3, 3, 3]{CHECK}",
    ),
    "negative size": (
        lambda m: set_weight(m, dims=[-4, 3, 3, 3]),
        f"trace: %w (initializer): its shape is [-4, 3, 3, 3]{CHECK}",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    change, text = CASES[name]
    proto = conv()
    change(proto)
    assert refused(proto, tmp_path) == text


def test_a_required_attribute_that_is_missing(tmp_path: Path) -> None:
    proto = model("y = Cast<to = 1>(x)", {"x": ("N", 3)}, "y")
    del proto.graph.node[0].attribute[:]
    assert refused(proto, tmp_path) == f"trace: %y (Cast): its attribute 'to' is missing{CHECK}"


def test_an_attribute_of_an_op_that_onnx_does_not_know(tmp_path: Path) -> None:
    proto = model("y = Sigmoid(x)", {"x": ("N", 3)}, "y")
    proto.graph.node[0].op_type, proto.graph.node[0].domain = "QuickGelu", "com.microsoft"
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    set_attribute(proto, "alpha", "text")
    text = refused(proto, tmp_path)
    assert text == f"trace: %y (QuickGelu): its attribute 'alpha' is of type STRING{CHECK}"


def test_whatever_goes_wrong_in_a_row_names_the_node(tmp_path: Path) -> None:
    proto = model("y = Transpose<perm = [0, 7]>(x)", {"x": ("N", 3)}, "y")
    text = refused(proto, tmp_path)
    assert text == f"trace: %y (Transpose): it cannot be read: IndexError: tuple index out of range{CHECK}"


@pytest.mark.parametrize(
    "text", ["y = ConstantOfShape(n)", "a = Range(zero, large, one)\ny = Identity(a)"], ids=["filled", "counted"]
)
def test_constants_that_would_fill_the_memory_are_not_computed(text: str) -> None:
    numbers = {"zero": 0, "one": 1, "large": 2**40}
    arrays = {name: np.asarray(number) for name, number in numbers.items() if name in text}
    if "(n)" in text:
        arrays["n"] = np.asarray([2**32, 2**32])
    host = OnnxHost.from_model(model(text, {"x": ("N", 3)}, "y", **arrays))
    assert host.graph.nodes[0].op == "opaque"


# ---------------------------------------------------------------- external data


def relocated(folder: Path, **entries: str | None) -> Path:
    """The model of `external`, whose weight w1 lies elsewhere; `None` removes an entry."""
    (folder / "big.onnx.data").unlink(missing_ok=True)  # onnx.save appends
    path = external(folder)
    proto = onnx.load(path, load_external_data=False)
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == "w1")
    kept = {entry.key: entry.value for entry in tensor.external_data} | entries
    del tensor.external_data[:]
    for key, value in kept.items():
        if value is not None:
            tensor.external_data.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())
    return path


def message(path: Path) -> str:
    with pytest.raises(TraceError) as error:
        OnnxHost.load(path)
    return str(error.value)


@pytest.mark.parametrize("relative", [False, True], ids=["by absolute path", "by relative path"])
@pytest.mark.parametrize("kind", ["parent", "absolute", "link"])
def test_data_outside_the_folder_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, relative: bool
) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    folder.mkdir()
    path = external(folder)
    secret.write_bytes((folder / "big.onnx.data").read_bytes())
    (folder / "link").symlink_to(secret)
    location = {"parent": "../secret", "absolute": str(secret), "link": "link"}[kind]
    path = relocated(folder, location=location)
    monkeypatch.chdir(folder)
    reason = f"its external data file {location} is outside the model's folder"
    assert message(Path("big.onnx") if relative else path) == f"trace: %w1 (initializer): {reason}{BESIDE}"


def test_links_and_folders_inside_the_folder_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = external(tmp_path)
    expected = OnnxHost.load(path).run([random(4, 50)])[0]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "weights").write_bytes((tmp_path / "big.onnx.data").read_bytes())
    (tmp_path / "link").symlink_to("data/weights")
    for location in ("data/weights", "link"):
        host = OnnxHost.load(relocated(tmp_path, location=location))
        np.testing.assert_array_equal(host.run([random(4, 50)])[0], expected)
    monkeypatch.chdir(tmp_path)
    host = OnnxHost.load("big.onnx")
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(host.run([random(4, 50)])[0], expected)


def test_data_that_do_not_fit(tmp_path: Path) -> None:
    data, large = tmp_path / "big.onnx.data", 50 * 80 * 4
    assert message(relocated(tmp_path, length="4")) == (
        f"trace: %w1 (initializer): it has 4 bytes of external data, but its shape [50, 80] needs {large}{BESIDE}"
    )
    assert message(relocated(tmp_path, offset="-4")) in (
        f"trace: cannot read {tmp_path / 'big.onnx'}: External data offset must be non-negative, got -4 for tensor 'w1'\n"
        "  fix: export or download it again; an .onnx file is a serialised ModelProto",
        f"trace: %w1 (initializer): its external data start at -4 bytes in {data}{BESIDE}",  # an onnx that does not look
    )
    size = data.stat().st_size
    assert message(relocated(tmp_path, offset=str(size - 8), length=None)) == (
        f"trace: %w1 (initializer): its external data file {data} is cut off: {size} bytes, {size - 8 + large} are needed"
        f"{BESIDE}"
    )
    path = relocated(tmp_path)
    os.link(data, tmp_path / "another")
    assert message(path) == (
        f"trace: %w1 (initializer): its external data file {data} has several hard links, and onnx does not read such files{BESIDE}"
    )


# ---------------------------------------------------------------- defaults


def with_defaults(*names: str, ir_version: int = 8) -> onnx.ModelProto:
    text = "h = MatMul(x, w1)\na = Relu(h)\nk = MatMul(a, w2)\nb = Relu(k)\nz = MatMul(b, w3)\ny = Mul(z, s)"
    weights = {"w1": random(5, 8), "w2": random(8, 6), "w3": random(6, 3), "s": np.asarray(2.0, dtype=np.float32)}
    proto = model(text, {"x": ("N", 5)}, "y", **weights)
    proto.ir_version = ir_version
    for name in names:
        proto.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, weights[name].shape))
    return proto


def test_a_default_is_a_value_of_run_time_and_stays_an_input(tmp_path: Path) -> None:
    host = OnnxHost.from_model(with_defaults("w3", "s"))
    program = cmrc.trace(with_defaults("w3", "s"))
    why = (
        "'w3' is an input of the model with a default, which a caller may replace; "
        "onnx_ir.passes.common.RemoveInitializersFromInputsPass makes it a parameter"
    )
    with pytest.raises(ResidueError) as error:
        cmrc.lower(program, cmrc.Plan(program).do("b", units=[0, 1], constant=0.5))
    assert str(error.value) == (
        f"residue: %z (MatMul): a replacement cannot pass: {why}\n"
        "  at plan: do[0] (b)\n"
        '  fix: leave that site out, choose another, or allow what stays at run time with residue="keep"'
    )
    lowered = lower(host, [random(4, 5)], "a", 1, (0, 1), (5.0, 15.0))
    assert [value.name for value in lowered.model.graph.inputs] == ["x", "w3", "s"]
    lowered.save(tmp_path / "m.onnx")
    again, x = OnnxHost.load(tmp_path / "m.onnx"), random(4, 5)
    assert list(again.inputs) == ["x"]
    plain, doubled = again.run({"x": x})[0], again.run({"x": x, "s": np.asarray(4.0, dtype=np.float32)})[0]
    np.testing.assert_array_equal(doubled, 2 * plain)
    with pytest.raises(HostError, match="the model has no input w2"):
        again.run({"x": x, "w2": random(8, 6)})


def test_a_default_that_nobody_reads_any_more_stays_an_input() -> None:
    text = "a = Relu(x)\nk = Mul(x, s)\nb = Concat<axis = 1>(a, k)\ny = MatMul(b, v)"
    proto = model(text, {"x": ("N", 5)}, "y", v=random(10, 3), s=np.asarray(2.0, dtype=np.float32))
    proto.graph.input.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, []))
    lowered = lower(OnnxHost.from_model(proto), [random(4, 5)], "b", 1, range(5, 10), np.full(5, 5.0))
    assert [node.op_type for node in lowered.model.graph] == ["Relu", "MatMul", "Add"]
    assert [value.name for value in lowered.model.graph.inputs] == ["x", "s"]


def test_before_ir_version_4_initializers_are_inputs_and_parameters() -> None:
    host = OnnxHost.from_model(with_defaults("w1", "w2", "w3", "s", ir_version=3))
    lowered = lower(host, [random(4, 5)], "b", 1, (0, 1), (5.0, 15.0))
    assert lowered.model.graph.initializers["w3"].shape == [4, 3]


def test_names_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(conv().SerializeToString().replace(b"Relu", b"Re\x96u"))
    with pytest.raises(TraceError) as error:
        cmrc.trace(path)
    assert str(error.value) == f"trace: the model has a name that is not text: b'Re\\x96u'{CHECK}"


def test_a_model_that_contradicts_itself_is_no_fault_of_cmrc() -> None:
    text = "a, b = Split<axis = 1>(x, sizes)\nc = Concat<axis = 1>(b, a)\ny = MatMul(c, w)"
    proto = model(text, {"x": (2, 6)}, "y", sizes=np.array([2, 4]), w=random(6, 3))
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 3
    with pytest.raises(TraceError) as error:
        cmrc.trace(proto).sites()
    text = str(error.value)
    assert text.startswith("trace: %a (select): the model contradicts itself: [ShapeInferenceError]")
    assert text.endswith(
        "fix: see what onnx.checker.check_model(model, full_check=True) says, and export the model again"
    )


def _contradicting() -> onnx.ModelProto:
    """It can be read and lowered all the same, but onnx objects to it."""
    proto = conv()
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 77
    return proto


@pytest.mark.parametrize("error", [IndexError, ValueError, KeyError, ZeroDivisionError, AssertionError, MemoryError])
def test_what_a_contradiction_explains(error: type[Exception]) -> None:
    program = cmrc.trace(_contradicting())
    with (
        pytest.raises(TraceError, match="the model contradicts itself") as raised,
        blaming_contradictions(program.host),
    ):
        raise error("of sizes")
    assert isinstance(raised.value.__cause__, error)


@pytest.mark.parametrize("error", [OSError, ImportError, NameError, NotImplementedError])
def test_what_no_contradiction_explains(error: type[Exception]) -> None:
    program = cmrc.trace(_contradicting())
    with pytest.raises(error, match="of the machine"), blaming_contradictions(program.host):
        raise error("of the machine")


def test_a_fault_in_a_model_that_onnx_takes_is_one_of_cmrc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: object) -> None:
        raise GraphError("h", "linear", "is broken")

    monkeypatch.setattr("cmrc.program.program.verify_graph", fail)
    with pytest.raises(GraphError, match="this is a fault of cmrc"):
        cmrc.trace(conv()).sites()
