"""`cmrc verify` on the command line: reports, decisions, comparisons and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import cli


def test_verify_reports_and_decides(held_out: Path) -> None:
    call = "verify", "model.onnx", "gentle.onnx", "gentle.json", "--data", "held-out.npz", "--swaps", "600"
    shown = cli(*call)
    assert shown.exit_code == 0, shown.output
    assert "600 swaps at rate 0.5 on 360 inputs: act4 (60 of 64 units retained)" in shown.stdout
    assert "accuracy, reduced" in shown.stdout
    decided = cli(*call, "--until", "iia>=0.8", "--json", "--no-controls")
    assert decided.exit_code == 0, decided.output
    document = json.loads(decided.stdout)["plans"]["gentle.json"]
    assert document["decision"]["holds"] is True
    assert document["swaps"] <= 600
    assert document["controls"] == {}
    failed = cli(*call, "--until", "iia>=0.98", "--json", "--p", "0.3", "--p", "0.7", "--site", "act4")
    assert failed.exit_code == 1
    assert set(json.loads(failed.stdout)["plans"]["gentle.json"]["by_rate"]) == {"0.3", "0.7"}


def test_verify_compares_plans_and_draws_them(held_out: Path) -> None:
    call = ("verify", "model.onnx", "gentle.onnx", "gentle.json", "-", "harsh.json", "--data", "held-out.npz")
    shown = cli(*call, "--swaps", "300", "--no-controls", "--plot", "plans.png")
    assert shown.exit_code == 0, shown.output
    assert "harsh.json minus gentle.json: ΔIIA -0." in shown.stdout
    assert Path("plans.png").read_bytes().startswith(b"\x89PNG")


def test_verify_says_which_of_two_is_better(held_out: Path) -> None:
    models = ("gentle.onnx", "gentle.json"), ("-", "harsh.json")
    call = ("verify", "model.onnx", *models[0], *models[1], "--data", "held-out.npz", "--better", "iia")
    shown = cli(*call)
    assert shown.exit_code == 0, shown.output
    assert "The first is better by iia (first − second +0." in shown.stdout
    other = cli("verify", "model.onnx", *models[1], *models[0], "--data", "held-out.npz", "--better", "kl", "--json")
    assert (other.exit_code, json.loads(other.stdout)["better"]) == (1, "second")


def test_verify_without_swaps(held_out: Path) -> None:
    shown = cli("verify", "model.onnx", "gentle.onnx", "gentle.json", "--data", "held-out.npz", "--swaps", "0")
    assert shown.exit_code == 0, shown.output
    assert "This says nothing about interventions." in shown.stdout


def test_verify_tells_models_of_one_plan_apart(held_out: Path) -> None:
    call = ("verify", "model.onnx", "gentle.onnx", "gentle.json", "-", "gentle.json", "--data", "held-out.npz")
    shown = cli(*call, "--swaps", "100", "--no-controls", "--json")
    assert shown.exit_code == 0, shown.output
    assert list(json.loads(shown.stdout)["plans"]) == ["gentle.onnx gentle.json", "- gentle.json"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("gentle.onnx",), "every lowered model needs its plan"),
        (("-", "gentle.json", "-", "gentle.json"), "- gentle.json is given twice"),
        (("gentle.onnx", "harsh.json"), "the reduced model has 60 units here, the plan retains 24 of 64"),
        (("gentle.onnx", "gentle.json", "--until", "kl>=1"), "the target 'kl>=1' is not understood"),
        (
            ("gentle.onnx", "gentle.json", "--until", "iia>=0.999"),
            "iia>=0.999 at level 0.95 needs at least 6364 held-out inputs, even if all agree, but there are 360",
        ),
        (("gentle.onnx", "gentle.json", "--better", "iia"), "--better compares two lowered models"),
        (("gentle.onnx", "gentle.json", "--p", "2"), "swaps at rate 2.0"),
        (("gentle.onnx", "gentle.json", "--delta", "0"), "delta is 0"),
        (("gentle.onnx", "gentle.json", "--delta", "2"), "delta is 2"),
    ],
)
def test_verify_refuses_what_does_not_fit(held_out: Path, arguments: tuple[str, ...], reason: str) -> None:
    shown = cli("verify", "model.onnx", *arguments, "--data", "held-out.npz", "--json")
    assert shown.exit_code == 2
    assert json.loads(shown.stdout)["error"]["reason"] == reason
