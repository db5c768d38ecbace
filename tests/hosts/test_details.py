"""The fingerprint tells models apart that differ in what only their host knows, and only those."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hosts.onnx.lowering import model, random
from onnx import TensorProto, helper, numpy_helper

import cmrc
from cmrc.errors import FingerprintError
from cmrc.hosts.onnx.host import OnnxHost
from cmrc.ir.fingerprint import Fingerprint, difference


def of(proto: onnx.ModelProto) -> Fingerprint:
    return cmrc.trace(proto).fingerprint


def simple(text: str, outputs: str = "y") -> onnx.ModelProto:
    arrays = {"k": np.asarray([2]), "axis": np.asarray(1), "w": random(8, 5)}
    used = {name: array for name, array in arrays.items() if name in text.replace("axis =", "")}
    return model(text, {"x": ("N", 8)}, outputs, **used)


def branched(*, number: float = 1.0) -> onnx.ModelProto:
    """If over two bodies, one of which adds a number. An input decides: a condition that is stored would be settled at once."""

    def body(name: str, op: str, value: float) -> onnx.GraphProto:
        constant = numpy_helper.from_array(np.asarray([value], dtype=np.float32), f"t_{name}_c")
        node = helper.make_node(op, ["h", constant.name], [f"t_{name}"], name=f"t_{name}_node")
        info = helper.make_tensor_value_info(f"t_{name}", TensorProto.FLOAT, None)
        return helper.make_graph([node], f"t_{name}_graph", [], [info], [constant])

    proto = model("h = MatMul(x, w)\ny = Relu(h)", {"x": ("N", 8)}, "y", w=random(8, 5))
    proto.graph.input.append(helper.make_tensor_value_info("which", TensorProto.BOOL, []))
    node = helper.make_node(
        "If", ["which"], ["z"], then_branch=body("a", "Add", number), else_branch=body("b", "Mul", 2.0)
    )
    proto.graph.node.append(node)
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    return proto


ONNX_PAIRS: dict[str, tuple[onnx.ModelProto, onnx.ModelProto]] = {
    "topk": (
        simple("h = MatMul(x, w)\ny, i = TopK<axis = -1, largest = 1>(h, k)"),
        simple("h = MatMul(x, w)\ny, i = TopK<axis = -1, largest = 0>(h, k)"),
    ),
    "cumsum": (simple("y = CumSum<reverse = 0>(x, axis)"), simple("y = CumSum<reverse = 1>(x, axis)")),
    "norm": (simple("y = LpNormalization<p = 1>(x)"), simple("y = LpNormalization<p = 2>(x)")),
    "softmax of another opset": (
        model("y = Softmax<axis = 1>(x)", {"x": ("N", 3, 4)}, "y", opset=12),
        model("y = Softmax<axis = 1>(x)", {"x": ("N", 3, 4)}, "y", opset=13),
    ),
    "body": (branched(number=1.0), branched(number=2.0)),
    "fewer outputs": (simple("a = Relu(x)\ny = Neg(a)", "y a"), simple("a = Relu(x)\ny = Neg(a)", "y")),
    "outputs in another order": (simple("a = Relu(x)\ny = Neg(a)", "y a"), simple("a = Relu(x)\ny = Neg(a)", "a y")),
}


@pytest.mark.parametrize("name", ONNX_PAIRS)
def test_onnx_models_that_differ(name: str) -> None:
    one, other = ONNX_PAIRS[name]
    assert of(one) == of(one)
    assert of(one).digest != of(other).digest
    structure = "the same ops and parameters differ in wiring, sizes, names, attributes or outputs"
    weights = "the values of 1 of 3 parameters differ, z/then/t_a_c first"
    assert difference(of(one), of(other)) == (weights if name == "body" else structure)


def test_notes_are_no_difference() -> None:
    one, other = branched(), branched()
    other.doc_string, other.graph.doc_string, other.graph.name = "what", "ever", "renamed"
    other.graph.node[0].doc_string = "a note"
    assert of(one) == of(other)
    assert OnnxHost.from_model(one).details() == OnnxHost.from_model(other).details()


class Net(torch.nn.Module):
    """A linear layer, and a function behind it."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = torch.nn.Linear(8, 5), function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self.linear(x))


def of_torch(function: Callable[[torch.Tensor], object]) -> Fingerprint:
    return cmrc.trace(Net(function).eval().requires_grad_(False), (torch.ones(3, 8),)).fingerprint


def chosen(number: float) -> Callable[[torch.Tensor], object]:
    return lambda h: torch.cond(h.sum() > 0, lambda a: a + number, lambda a: a * 2, (h,))


FX_PAIRS: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[torch.Tensor], object]]] = {
    "topk": (lambda h: h.topk(2, largest=True)[0], lambda h: h.topk(2, largest=False)[0]),
    "sort": (lambda h: h.sort(descending=True)[0], lambda h: h.sort(descending=False)[0]),
    "norm": (lambda h: torch.renorm(h, 1, 0, 1.0), lambda h: torch.renorm(h, 2, 0, 1.0)),
    "body": (chosen(1.0), chosen(2.0)),
    "fewer outputs": (lambda h: (h.relu(), h.neg()), lambda h: (h.relu(), h.neg())[:1]),
    "outputs in another order": (lambda h: (h.relu(), h.neg()), lambda h: tuple(reversed((h.relu(), h.neg())))),
}


@pytest.mark.parametrize("name", FX_PAIRS)
def test_torch_models_that_differ(name: str) -> None:
    one, other = FX_PAIRS[name]
    assert of_torch(one) == of_torch(one)
    assert of_torch(one).digest != of_torch(other).digest


def test_a_plan_with_a_fingerprint_of_another_scheme_is_loaded_and_refused(tmp_path: Path) -> None:
    program = cmrc.trace(simple("h = MatMul(x, w)\na = Relu(h)\ny = Neg(a)"))
    path = tmp_path / "plan.json"
    cmrc.Plan(program).do("a", units=[0], constant=0.5).save(path)
    document = json.loads(path.read_text())
    assert document["model"].pop("scheme") == 2
    path.write_text(json.dumps(document))
    with pytest.raises(FingerprintError) as error:
        program.require(cmrc.Plan.load(path))
    assert str(error.value) == (
        "fingerprint: the plan was made by another version of cmrc, whose fingerprints cannot be compared with this one's "
        "(scheme 1, not 2)\n"
        "  at plan.json\n"
        "  fix: make it again; or, if you know that the model is the same, remove `model` from the file"
    )
    del document["model"]
    path.write_text(json.dumps(document))
    program.require(cmrc.Plan.load(path))
