"""`cmrc provenance`, on files as they were written, and as somebody changed them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import cmrc
from cmrc.cli.provenance import in_words
from tests.command import cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.onnx"


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    """A lowered model, its original, and its plan."""
    program = cmrc.trace(EXAMPLE)
    site = next(s for s in program.sites() if s.folding is not None and s.folding.folds and s.units > 2)
    plan = cmrc.Plan(program).do(site.name, units=[1], constant=0.5)
    plan.save(tmp_path / "plan.json")
    cmrc.lower(program, plan).save(tmp_path / "small.onnx")
    return str(tmp_path / "small.onnx"), str(EXAMPLE), str(tmp_path / "plan.json")


def test_every_link_is_shown_and_verified(files: tuple[str, str, str]) -> None:
    small, model, plan = files
    shown = cli("provenance", small)
    assert shown.exit_code == 0
    assert cmrc.trace(EXAMPLE).fingerprint.digest in shown.output
    assert "verify it with --model and --plan" in shown.output
    verified = cli("provenance", small, "--model", model, "--plan", plan)
    assert verified.exit_code == 0, verified.output
    assert "this is that model, lowered by that plan" in verified.output
    document = json.loads(cli("provenance", small, "--model", model, "--plan", plan, "--json").stdout)
    assert document["holds"]
    assert set(document["links"]) == {"source", "plan", "result"}


def test_a_weight_changed_afterwards_breaks_the_last_link(files: tuple[str, str, str]) -> None:
    small, model, plan = files
    changed = onnx.load(small)
    tensor = next(t for t in changed.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
    array = numpy_helper.to_array(tensor).copy()
    array.flat[0] = np.nextafter(array.flat[0], np.float32(9))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(changed, small)
    result = cli("provenance", small, "--model", model, "--plan", plan)
    assert result.exit_code == 1
    assert "NOT verified: lowered again" in result.output


def test_another_plan_does_not_verify(files: tuple[str, str, str], tmp_path: Path) -> None:
    small, model, _ = files
    program = cmrc.trace(EXAMPLE)
    site = next(s for s in program.sites() if s.folding is not None and s.folding.folds and s.units > 2)
    cmrc.Plan(program).do(site.name, units=[1], constant=0.25).save(tmp_path / "other.json")
    result = cli("provenance", small, "--model", model, "--plan", str(tmp_path / "other.json"))
    assert result.exit_code == 1
    assert "NOT verified: plan" in result.output


def test_a_file_that_cmrc_did_not_write_says_so() -> None:
    result = cli("provenance", str(EXAMPLE))
    assert result.exit_code == 2
    assert "the model has no record of where it comes from" in result.output


def test_model_and_plan_go_together(files: tuple[str, str, str]) -> None:
    small, model, _ = files
    result = cli("provenance", small, "--model", model)
    assert result.exit_code == 2
    assert "give both of them, or neither" in result.output


def test_the_file_name_does_not_change_the_bytes(tmp_path: Path) -> None:
    program = cmrc.trace(EXAMPLE)
    site = next(s for s in program.sites() if s.folding is not None and s.folding.folds and s.units > 2)
    lowered = cmrc.lower(program, cmrc.Plan(program).do(site.name, units=[0], constant=0.5))
    lowered.save(tmp_path / "a.onnx")
    lowered.save(tmp_path / "another-name.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "another-name.onnx").read_bytes()


def test_findings_travel_with_the_file_and_bytes_do_not_depend_on_its_name(
    files: tuple[str, str, str], tmp_path: Path
) -> None:
    _, model, plan = files
    lowered = cmrc.lower(model, plan)
    results = {"check": {"holds": True}, "quality": {"agreement": [0.99, 0.98, 1.0]}}
    for name in ("a.onnx", "another name.onnx"):
        lowered.save(tmp_path / name, results=results)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "another name.onnx").read_bytes()
    again = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import cmrc; cmrc.lower({model!r}, {plan!r}).save({str(tmp_path / 'b.onnx')!r}, results={results!r})",
        ],
        check=True,
    )
    assert again.returncode == 0
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    small = str(tmp_path / "a.onnx")
    shown = cli("provenance", small, "--model", model, "--plan", plan)
    assert shown.exit_code == 0, shown.output
    assert "numpy" in shown.output
    assert "0.99" in shown.output
    document = json.loads(cli("provenance", small, "--model", model, "--plan", plan, "--json").stdout)
    assert document["links"]["check"] == {"recorded": "exact", "actual": "exact", "holds": True}


def test_a_recorded_check_that_is_not_true(files: tuple[str, str, str], tmp_path: Path) -> None:
    _, model, plan = files
    cmrc.lower(model, plan).save(tmp_path / "a.onnx", results={"check": {"holds": False}})
    shown = cli("provenance", str(tmp_path / "a.onnx"), "--model", model, "--plan", plan)
    assert shown.exit_code == 1
    assert "NOT verified: exact" in shown.output


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("check", '{"holds": true}', "exact"),
        ("check", '{"holds": 1}', "not exact"),
        (
            "quality",
            '{"agreement": [0.99, 0.98, 1], "at_least": 0.97, "probability": 0.95, "held_out": 360, "accuracy": [0.9, 0.8], "metric": null}',
            "agreement 0.9900 (at least 0.9700 with probability 0.95; 360 samples), accuracy 0.9000 -> 0.8000",
        ),
        ("verification", '{"iia": [0.9, 0.85, 0.95], "swaps": 200}', "IIA 0.9000 [0.8500, 0.9500] (200 swaps)"),
        ("quality", "not of this form", "not of this form"),
        ("source", "0123", "0123"),
    ],
)
def test_findings_in_words(name: str, text: str, said: str) -> None:
    assert in_words(name, text) == said
