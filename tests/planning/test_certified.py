"""Certified plans: the smallest one for which a target is certified."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import cli

import cmrc
from cmrc.errors import CertifyError

DIGITS = Path(__file__).parents[2] / "examples"


def digits_program() -> tuple[cmrc.Program, list[tuple[np.ndarray, ...]], list[tuple[np.ndarray, ...]]]:
    train, test = (np.load(DIGITS / f"digits_{part}.npz") for part in ("train", "test"))
    sets = [[(part["images"], part["labels"])] for part in (train, test)]
    return cmrc.trace(DIGITS / "digits.onnx"), sets[0], sets[1]


def test_the_smallest_plan_of_which_a_target_is_certified(tmp_path: Path) -> None:
    program, train, test = digits_program()
    stats = cmrc.calibrate(program, train, sites="act4", need=["scatter"])
    given = {"sites": ["act4"], "certify": "iia>=0.9", "held_out": test, "keeps": [0.9, 0.75, 0.5, 0.25]}
    plan = cmrc.plan(program, stats, **given)
    certificate = plan.made["certificate"]
    assert certificate["keep"] in (0.9, 0.75, 0.5)
    assert [t["holds"] for t in certificate["tests"]] == [True] * (len(certificate["tests"]) - 1) + [
        certificate["tests"][-1]["holds"]
    ]
    assert certificate["tests"][-1]["holds"] is not True
    swapped = cmrc.verify(program, plan, test, controls=False)
    assert np.isclose(certificate["without_swaps"]["d2"], swapped.d2.value, rtol=0.3)  # of other data
    assert certificate["without_swaps"]["iia"] < swapped.iia.value
    assert plan.made["sites"]["act4"]["kept"] == round(certificate["keep"] * 64)
    assert cmrc.verify(program, cmrc.lower(program, plan), test, seed=7, controls=False).iia.high > 0.9
    plan.save(tmp_path / "plan.json")
    assert cmrc.Plan.load(tmp_path / "plan.json").made["certificate"] == certificate
    assert cmrc.plan(program, stats, **given).made["certificate"] == certificate


def test_the_certificate_of_the_calibration_says_where_the_search_starts() -> None:
    """Shares that D2 shows to be safe are not tested; without the data, or away from the last linear op, all are."""
    program, train, test = digits_program()
    stats = cmrc.calibrate(program, train, sites=["act3", "act4"], need=["scatter"])
    given = {"certify": "iia>=0.8", "held_out": test, "keeps": [0.95, 0.9, 0.75, 0.5, 0.25], "preset": "cmr-logit"}
    tested = {}
    for name, options in {
        "steered": {"data": train, "sites": ["act4"]},
        "no data": {"sites": ["act4"]},
        "an iterator": {"data": iter(train), "sites": ["act4"]},
        "two sites": {"data": train, "sites": ["act3", "act4"]},
    }.items():
        certificate = cmrc.plan(program, stats, **given, **options).made["certificate"]
        tested[name] = [test["keep"] for test in certificate["tests"]]
        if name != "two sites":
            assert certificate["keep"] == 0.75, name
    assert tested["steered"] == [0.9, 0.75, 0.5]
    assert tested["no data"] == tested["an iterator"] == [0.95, 0.9, 0.75, 0.5]
    assert tested["two sites"][0] == 0.95


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "there are no held-out data to certify on"),
        ({"held_out": "train"}, "the held-out data are the calibration data"),
        ({"held_out": "test", "keeps": [0.5, 0.9]}, "the shares to keep are not in falling order"),
        ({"held_out": "test"}, "iia>=0.99 at level 0.95 needs at least 632 held-out inputs"),
        (
            {"held_out": "test", "keeps": [1], "certify": "iia>=0.98"},
            "iia>=0.98 is not certified with 1 of the units kept",
        ),
    ],
)
def test_what_cannot_be_certified_is_refused(options: dict[str, object], reason: str) -> None:
    program, train, test = digits_program()
    given = {
        **options,
        **({"held_out": {"train": train, "test": test}[options["held_out"]]} if "held_out" in options else {}),
    }
    with pytest.raises(CertifyError, match=reason):
        cmrc.plan(program, data=train, sites=["act4"], **{"certify": "iia>=0.99", **given})


def test_certified_plans_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("train", "test"):
        digits = np.load(DIGITS / f"digits_{part}.npz")
        np.savez(f"{part}.npz", image=digits["images"], labels=digits["labels"])
    call = ["plan", str(DIGITS / "digits.onnx"), "--data", "train.npz", "--sites", "act4", "-o", "plan.json", "--json"]
    done = cli(*call, "--certify", "iia>=0.9", "--held-out", "test.npz", "--delta", "0.1")
    assert done.exit_code == 0, done.output
    certificate = json.loads(done.stdout)["certificate"]
    assert (certificate["target"], certificate["delta"]) == ("iia>=0.9", 0.1)
    assert cmrc.Plan.load("plan.json").made["certificate"] == certificate
    shown = cli("plan", "show", "plan.json")
    assert "iia>=0.9 is certified with probability 0.9 at keep" in shown.stdout
