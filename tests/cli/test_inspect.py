"""`cmrc inspect`: what a model takes, gives and costs, which sites fold and what they reach."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from command import cli
from hosts.onnx.lowering import model, random
from onnx import helper

import cmrc

DIGITS = Path(__file__).parent.parent.parent / "examples" / "digits.onnx"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_model_its_summary_and_the_best_sites() -> None:
    shown = cli("inspect", str(DIGITS))
    assert shown.exit_code == 0
    assert lines(shown.stdout) == [
        "inputs image float32[batch, 1, 8, 8]",
        "outputs logits float32[batch, 10]",
        "size 79,370 parameters, 317,480 bytes, 378,496 MACs (with batch = 1)",
        "sites 11, of which 9 fold (5 of them for constants only); they reach 100% of the parameters and 100% of the MACs",
        "",
        "site op axis units reach read by a replaced unit",
        "act3 gelu 1 128 93% fc2 folds into fc2",
        "pool max_pool 1 32 89% flatten folds into fc1",
        "act4 relu 1 64 11% head folds into head",
        "act1 relu 1 16 6% bn2 folds into bn2",
        "",
        "the 4 best; --foldable lists all 9 that fold, --all every site",
    ]


def test_all_and_foldable_list_more() -> None:
    program = cmrc.trace(DIGITS)
    every = [line.split()[0] for line in lines(cli("inspect", str(DIGITS), "--all").stdout)[6:]]
    assert every == [site.name for site in program.sites()]
    folding = [line.split()[0] for line in lines(cli("inspect", str(DIGITS), "--foldable").stdout)[6:15]]
    assert folding == [s.name for s in program.sites() if s.folding is not None and s.folding.constant.folds]


def test_json_holds_everything_whole() -> None:
    document = json.loads(cli("inspect", str(DIGITS), "--json").stdout)
    assert document["inputs"] == [{"name": "image", "shape": ["batch", 1, 8, 8], "dtype": "float32"}]
    assert document["outputs"] == [{"name": "logits", "shape": ["batch", 10], "dtype": "float32"}]
    assert document["cost"] == {"parameters": 79370, "bytes": 317480, "macs": 378496}
    assert (len(document["sites"]), document["foldable"], document["reach"]["share_of_parameters"]) == (11, 9, 1.0)
    act4 = next(site for site in document["sites"] if site["name"] == "act4")
    assert act4["reach"]["parameters"] == 128 * 64 + 64 + 64 * 10 + 10  # fc2, which makes its units, and the head
    assert len(json.loads(cli("inspect", str(DIGITS), "--json", "--foldable").stdout)["sites"]) == 9


@pytest.mark.parametrize(
    ("nodes", "summary"),
    [
        (
            "h = Conv(x, w)\na = Relu(h)\nr = RandomNormalLike(v)\ny = Conv(a, r)",
            "sites 2, of which none fold; most often (2 times) because: its weight is computed at run time",
        ),
        (
            "r = RandomNormalLike(w)\ny = Conv(x, r)",
            "sites none: the model has no linear op and no convolution whose weights are stored in it; "
            "ops that cmrc does not know: 1 RandomNormalLike, 1 Conv",
        ),
    ],
)
def test_a_model_of_which_nothing_folds_comes_with_the_reason(nodes: str, summary: str, tmp_path: Path) -> None:
    arrays = {"w": random(4, 3, 1, 1), "v": random(5, 4, 1, 1)}
    onnx.save(model(nodes, {"x": ("N", 3, 6, 6)}, "y", **arrays), tmp_path / "model.onnx")
    shown = cli("inspect", str(tmp_path / "model.onnx"))
    assert shown.exit_code == 0
    assert lines(shown.stdout)[3] == summary


def test_weights_that_are_one_number_each_are_sites() -> None:
    """The models that ship with onnx store no weights."""
    shown = lines(cli("inspect", str(LIGHT / "light_squeezenet.onnx")).stdout)
    assert shown[3].startswith("sites 66, of which 6")
    share = int(shown[3].partition("they reach ")[2].partition("%")[0])
    assert 0 < share <= 100


def test_long_lists_are_cut_for_people_and_whole_in_json(tmp_path: Path) -> None:
    """One value that fifty linear ops read."""
    size = 4
    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [size, size], [0.5] * size * size)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["first"], "first"),
        helper.make_node("Relu", ["first"], ["act"], "act"),
    ]
    nodes += [helper.make_node("MatMul", ["act", "w"], [f"y{i}"], f"reader{i}") for i in range(50)]
    graph = helper.make_graph(
        nodes, "many", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", size])],
        [helper.make_tensor_value_info(f"y{i}", onnx.TensorProto.FLOAT, ["n", size]) for i in range(50)], [weight],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "many.onnx")
    shown = cli("inspect", str(tmp_path / "many.onnx"))
    assert max(map(len, shown.stdout.splitlines())) < 300
    assert "reader0, reader1, reader2 and 47 more" in shown.stdout
    assert "y3 float32[n, 4] and 46 more" in shown.stdout
    document = json.loads(cli("inspect", str(tmp_path / "many.onnx"), "--json").stdout)
    act = next(site for site in document["sites"] if site["name"] == "act")
    assert len(act["consumers"]) == 50
