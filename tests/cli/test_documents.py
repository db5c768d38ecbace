"""Every `--json` is what its schema says, every command that has the flag has a schema, and errors are documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from command import cli
from onnx import TensorProto, helper

import cmrc
from cmrc.cli.app import Commands
from cmrc.cli.documents import DOCUMENTS
from cmrc.cli.plan import MakeOrRead

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = {
    "inspect": "inspect model.onnx",
    "calibrate": "calibrate model.onnx --data test.npz --sites act4 -o stats.safetensors",
    "plan": "plan model.onnx --data test.npz --sites act4 --preset vbp --keep 0.5 -o made.json",
    "plan show": "plan show plan.json",
    "plan diff": "plan diff plan.json other.json",
    "diagnose": "diagnose model.onnx --data test.npz --sites act4 --units 2",
    "lower": "lower model.onnx plan.json -o small.onnx",
    "annotate": "annotate model.onnx plan.json -o annotated.onnx",
    "check": "check model.onnx ready.onnx plan.json --data test.npz",
    "verify": "verify model.onnx ready.onnx plan.json --data test.npz --swaps 20",
    "provenance": "provenance ready.onnx --model model.onnx --plan plan.json",
    "bench": "bench model.onnx ready.onnx --sessions 2 --rounds 2",
    "reduce": "reduce model.onnx --data test.npz --macs 0.7 --frontier 0.7 --no-timed --no-refit --preset vbp -o r.onnx",
    "recover": "recover model.onnx plan.json --data test.npz --steps 2 -o recovered.onnx",
    "report": "report done.work -o page.html",
    "compare": "compare done.work done.work",
    "assume": "assume flagged.onnx flag=1 -o fixed.onnx",
    "error": "inspect nothing.onnx",
}


NEEDS = {"report": "vl_convert", "recover": "torch"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    shutil.copy(EXAMPLES / "digits.onnx", folder / "model.onnx")
    shutil.copy(EXAMPLES / "digits_test.npz", folder / "test.npz")
    program = cmrc.trace(folder / "model.onnx")
    plan = cmrc.Plan(program).do("act4", units=range(8), constant=0.0)
    plan.save(folder / "plan.json")
    cmrc.Plan(program).do("act4", units=range(4), constant=0.1).save(folder / "other.json")
    cmrc.lower(program, plan).save(folder / "ready.onnx")
    given = (
        "--data",
        str(folder / "test.npz"),
        "--macs",
        "0.7",
        "--frontier",
        "0.7",
        "--no-timed",
        "--no-refit",
        "--preset",
        "vbp",
    )
    assert cli("reduce", str(folder / "model.onnx"), *given, "-o", str(folder / "done.onnx")).exit_code == 0
    flag = helper.make_tensor_value_info("flag", TensorProto.FLOAT, [])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "flag"], ["y"])], "flagged", [x, flag], [y])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "flagged.onnx"
    )
    return folder


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_what_its_schema_says(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    shown = cli(*LINES[name].split(), "--json")
    assert shown.exit_code == {"plan diff": 1, "error": 2}.get(name, 0), shown.output
    document: dict[str, Any] = json.loads(shown.stdout)
    DOCUMENTS[name].model_validate(document, strict=True)
    broken = {key: value for key, value in document.items() if key != next(iter(document))}
    with pytest.raises(ValueError, match="Field required"):
        DOCUMENTS[name].model_validate(broken)


def test_every_command_with_the_flag_has_a_schema() -> None:
    names = [
        name for name in Commands.entries if name not in ("plan", "schema")
    ]  # the help of `schema` speaks of the flag
    names += ["plan" if name == "make" else f"plan {name}" for name in MakeOrRead.entries]
    flagged = {
        name
        for name in names
        if "--json" in cli(*(f"{name} make" if name == "plan" else name).split(), "--help").output
    }
    assert flagged == DOCUMENTS.keys() - {"error"}


def test_the_schema_command() -> None:
    assert cli("schema").stdout.split("\n")[:2] == ["reduce", "inspect"]
    schema = json.loads(cli("schema", "plan", "show").stdout)
    assert "do" in schema["properties"]
    shown = cli("schema", "nothing")
    assert shown.exit_code == 2
    assert "there is no schema for 'nothing'" in shown.stderr
