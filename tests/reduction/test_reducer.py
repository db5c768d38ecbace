"""`cmrc.reduce` on a real model: goals, the frontier, what resumes, what is left out, and honest verdicts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hosts.onnx.lowering import model, random

import cmrc
from cmrc.errors import CertifyError, InputError, RecipeError
from cmrc.program.lower import plan_digest
from cmrc.reduction.goals import Goals
from cmrc.reduction.subject import Subject
from cmrc.reduction.workfolder import digest_of_code
from cmrc.verification.bounds import Estimate

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL, TRAIN, TEST = (EXAMPLES / name for name in ("digits.onnx", "digits_train.npz", "digits_test.npz"))
QUICK: dict[str, Any] = {"held_out": TEST, "frontier": [0.8, 0.5], "refit": False, "timed": False, "samples": 600}


class Watching:
    """Remembers the stages."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, str]] = []

    def stage(self, name: str, detail: str) -> None:
        self.stages.append((name, detail))

    def track(self, items: Any, count: int | None, what: str) -> Any:
        return items


@pytest.fixture(scope="module")
def reduction(tmp_path_factory: pytest.TempPathFactory) -> cmrc.Reduction:
    return cmrc.reduce(MODEL, TRAIN, work=tmp_path_factory.mktemp("work") / "w", **QUICK)


def test_the_smallest_size_that_agrees_is_chosen_and_true(reduction: cmrc.Reduction, tmp_path: Path) -> None:
    assert reduction.ready
    assert [size.share for size in reduction.sizes] == [0.8, 0.5]
    assert [judgement.goal for judgement in reduction.judgements] == ["agreement 0.98"]
    reduction.save(tmp_path / "small.onnx")
    test = np.load(TEST)
    answers = [cmrc.trace(path).run([test["images"]])[0].argmax(1) for path in (MODEL, tmp_path / "small.onnx")]
    assert reduction.measures.quality.agreement.value == (answers[0] == answers[1]).mean()
    assert reduction.measures.quality.accuracy == (
        (answers[0] == test["labels"]).mean(),
        (answers[1] == test["labels"]).mean(),
    )
    assert reduction.measures.macs == cmrc.trace(tmp_path / "small.onnx").cost().macs
    assert reduction.measures.macs <= reduction.size.share * reduction.whole.macs
    assert reduction.check.holds


def test_the_words_and_the_json_say_the_same(reduction: cmrc.Reduction) -> None:
    document = json.loads(json.dumps(reduction.to_json()))
    assert document["ready"] is True
    assert str(reduction).splitlines()[-1] == reduction.verdict == document["verdict"]
    assert reduction.verdict.startswith("ready: ")
    assert document["chosen"] == reduction.size.share
    assert document["frontier"][0]["quality"]["agreement"][0] == reduction.sizes[0].measures.quality.agreement.value
    assert document["data"]["held_out"] == 360
    assert "the array 'images' is taken as input 'image'" in document["remarks"]
    assert document["widths"].keys() == {"act1", "pool", "act3", "act4"}


def test_a_second_call_continues_and_another_choice_costs_no_planning(tmp_path: Path) -> None:
    work, watching = tmp_path / "w", Watching()
    cmrc.reduce(MODEL, TRAIN, work=work, **QUICK)
    account, written = work / "account.json", {path.name: path.stat().st_mtime_ns for path in work.iterdir()}
    written.pop(account.name)  # tells of the last choice
    again = cmrc.reduce(MODEL, TRAIN, work=work, pick=0.8, observer=watching, **QUICK)
    assert ("calibration", "done before") in watching.stages
    assert {path.name: path.stat().st_mtime_ns for path in work.iterdir() if path != account} == written
    assert json.loads(account.read_text())["chosen"] == 0.8
    assert again.size.share == 0.8
    assert again.ready
    (work / "plan-macs-0.500.json").unlink()
    (work / "model-macs-0.500.onnx").unlink()
    third = cmrc.reduce(MODEL, TRAIN, work=work, pick=0.5, **QUICK)
    assert third.size.share == 0.5
    assert (work / "model-macs-0.800.onnx").stat().st_mtime_ns == written["model-macs-0.800.onnx"]


def test_a_goal_of_size_is_met_by_the_file_and_shares_the_calibration(tmp_path: Path) -> None:
    work, watching = tmp_path / "w", Watching()
    cmrc.reduce(MODEL, TRAIN, work=work, **{**QUICK, "frontier": [0.8]})
    small = cmrc.reduce(MODEL, TRAIN, work=work, size=0.3, observer=watching, **{**QUICK, "frontier": [0.6]})
    assert ("calibration", "done before") in watching.stages
    assert (work / "plan-macs-0.800.json").exists()
    small.save(tmp_path / "small.onnx")
    assert 0.28 < (tmp_path / "small.onnx").stat().st_size / MODEL.stat().st_size <= 0.3
    assert small.ready
    none = cmrc.reduce(MODEL, TRAIN, work=work, size=0.01, **{**QUICK, "frontier": [0.6]})
    least = none.measures.bytes / MODEL.stat().st_size
    assert none.verdict == (
        f"not ready: size 0.01 is out of reach: {least:.3f} of the file at the smallest size tried, {none.size.share:g} of the bytes; "
        "that is with all units removed that may be removed"
    )


def test_sizes_that_could_not_be_chosen_are_not_tried() -> None:
    def is_large(outputs: np.ndarray) -> float:
        return float(np.square(outputs).sum())  # moves with every replacement

    quick = {key: value for key, value in QUICK.items() if key != "frontier"}
    result = cmrc.reduce(MODEL, TRAIN, metric=is_large, drop=0, agreement=0.5, **quick)
    good = [size.measures.quality.drop.value <= 0 for size in result.sizes if size.measures.quality.drop]
    assert good == [False] * 5  # with a certificate no larger sizes are added
    said = f"sizes below {result.sizes[-1].share:g} were not tried, since 5 in a row are not good enough: frontier= names sizes to try"
    assert said in result.remarks


def test_a_work_folder_of_other_data_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "mine.txt").write_text("stays")
    cmrc.reduce(MODEL, TRAIN, work=tmp_path / "w", **{**QUICK, "frontier": [0.8]})
    other = cmrc.reduce(MODEL, TRAIN, work=tmp_path / "w", **{**QUICK, "frontier": [0.8], "samples": 500})
    assert (
        "the work folder held another model, data or recipe, or is from another version of cmrc: everything was done again"
        in other.remarks
    )
    assert (tmp_path / "w" / "mine.txt").read_text() == "stays"


def test_other_code_has_another_name(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("x = 1")
    first = digest_of_code.__wrapped__(tmp_path)
    assert digest_of_code.__wrapped__(tmp_path) == first
    (tmp_path / "inner" / "a.py").write_text("x = 2")
    assert digest_of_code.__wrapped__(tmp_path) != first


def test_larger_sizes_are_tried_where_the_usual_ones_are_not_good_enough() -> None:
    seen: list[Any] = []

    def closeness(outputs: Any) -> float:
        seen.append(outputs)
        return -float(np.abs(outputs - seen[0]).max())  # 0 for the original alone

    quick = {"held_out": TEST, "refit": False, "timed": False, "samples": 300}
    strict = cmrc.reduce(MODEL, TRAIN, metric=closeness, drop=0.0, **quick)
    assert [size.share for size in strict.sizes][:3] == [0.98, 0.95, 0.9]
    assert strict.size.share == 0.98
    assert "the largest size tried, 0.98 of the multiply-adds" in strict.verdict
    assert strict.verdict.endswith("give more data, or ask for less")


def test_larger_sizes_are_tried_where_the_largest_of_the_usual_ones_are_one_plan() -> None:
    """One of four units is a quarter of the work: 0.9 and 0.8 are the same plan."""
    arrays = {"w1": random(16, 4), "b1": random(4), "w2": random(4, 3), "b2": random(3)}
    coarse = model("h = Gemm(x, w1, b1)\na = Relu(h)\ny = Gemm(a, w2, b2)", {"x": ("N", 16)}, "y", **arrays)
    result = cmrc.reduce(coarse, random(400, 16), agreement=0.999, measured=True, timed=False, refit=False)
    shares = [size.share for size in result.sizes]
    assert shares[:2] == [0.95, 0.8]
    assert not result.ready


def test_goals_that_cannot_be_met_say_what_is_reachable() -> None:
    far = cmrc.reduce(MODEL, TRAIN, size=0.02, **{**QUICK, "frontier": [0.5]})
    assert not far.ready
    assert far.size.share == min(size.share for size in far.sizes)
    assert far.verdict.startswith("not ready: size 0.02 is ")
    strict = cmrc.reduce(MODEL, TRAIN, agreement=0.9999, measured=True, macs=0.3, **QUICK)
    assert not strict.ready
    assert "is not met together with the other goals" in strict.verdict or "is out of reach" in strict.verdict


def test_a_metric_of_the_user_and_its_drop() -> None:
    def share_of_zeros(outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return (outputs.argmax(1) == 0) == (labels == 0)

    result = cmrc.reduce(MODEL, TRAIN, metric=share_of_zeros, drop=0.01, **QUICK)
    quality = result.measures.quality
    assert result.ready
    assert quality.metric is not None
    assert quality.drop is not None
    assert quality.drop.value == pytest.approx(quality.metric[0] - quality.metric[1])
    with pytest.raises(InputError, match="the metric failed: ZeroDivisionError"):
        cmrc.reduce(MODEL, TRAIN, metric=lambda outputs: 1 / 0, drop=0.01, **QUICK)
    with pytest.raises(InputError, match=r"the metric returned an array of shape \[3\]"):
        cmrc.reduce(MODEL, TRAIN, metric=lambda outputs: [1, 2, 3], drop=0.01, **QUICK)


def test_a_drop_that_nothing_can_measure_is_refused_before_the_work(tmp_path: Path) -> None:
    with np.load(TRAIN) as arrays:
        np.save(tmp_path / "x.npy", arrays["images"][:200])
    with pytest.raises(RecipeError) as caught:
        cmrc.reduce(MODEL, tmp_path / "x.npy", drop=0.01, **{**QUICK, "held_out": 0.25})
    assert str(caught.value) == (
        "recipe: drop=0.01 cannot be measured: there are no labels that name classes, and no metric\n"
        "  fix: put an array `labels` beside the inputs, or classes into folders, or give metric=script.py:function"
    )


def test_what_every_layer_keeps_can_be_said() -> None:
    result = cmrc.reduce(MODEL, TRAIN, keep=0.5, **QUICK)
    assert {tuple(pair) for pair in result.to_json()["widths"].values()} == {(16, 8), (32, 16), (128, 64), (64, 32)}
    assert result.of == "units"


def test_agreement_is_certified_only_by_enough_samples() -> None:
    with pytest.raises(CertifyError, match=r"agreement=0\.999 needs at least 2995 held-out samples"):
        cmrc.reduce(MODEL, TRAIN, agreement=0.999, **QUICK)
    result = cmrc.reduce(MODEL, TRAIN, agreement=0.97, **QUICK)
    assert result.measures.quality.bound >= 0.97


def test_random_numbers_are_never_ready() -> None:
    result = cmrc.reduce(MODEL, **{**QUICK, "held_out": 0.25})
    assert not result.ready
    assert result.problems[-1] == "it was judged on random numbers; give data= of the kind that the model will see"


def test_times_are_beside_the_original(tmp_path: Path) -> None:
    result = cmrc.reduce(MODEL, TRAIN, work=tmp_path / "w", **{**QUICK, "frontier": [0.5], "timed": True})
    speed = result.measures.speed
    assert speed is not None
    assert speed.provider == "CPUExecutionProvider"
    assert speed.speedup.low <= speed.speedup.value <= speed.speedup.high
    assert result.whole.milliseconds is not None
    with pytest.raises(RecipeError, match="a speed goal needs timing"):
        cmrc.reduce(MODEL, TRAIN, speedup=1.1, **QUICK)


def test_swaps_verify_the_chosen_size() -> None:
    result = cmrc.reduce(MODEL, TRAIN, swaps=200, **{**QUICK, "frontier": [0.5]})
    assert result.verification is not None
    assert 0.5 < result.verification.iia.value <= 1
    assert result.verification.plain.agreement.value == result.measures.quality.agreement.value


def test_a_model_of_a_fixed_batch(tmp_path: Path) -> None:
    model = onnx.load(MODEL)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 16
    onnx.save(model, tmp_path / "fixed.onnx")
    result = cmrc.reduce(tmp_path / "fixed.onnx", TRAIN, **{**QUICK, "frontier": [0.6], "timed": True})
    dynamic = cmrc.reduce(MODEL, TRAIN, **{**QUICK, "frontier": [0.6], "batch": 16})
    assert result.measures.quality.agreement.value == pytest.approx(dynamic.measures.quality.agreement.value, abs=0.01)
    assert result.measures.speed is not None


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (None, "this model has no units to replace: no linear op and no convolution whose weights are stored in it"),
        (np.eye(4, dtype=np.float32), r"none of the \d sites of this model can be replaced and folded away"),
    ],
)
def test_a_model_without_a_site_that_folds(tmp_path: Path, weight: np.ndarray | None, message: str) -> None:
    """A softmax alone, and a product that only the softmax reads."""
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    nodes = [onnx.helper.make_node("Softmax", ["x" if weight is None else "h"], ["y"])]
    weights = [] if weight is None else [onnx.numpy_helper.from_array(weight, "w")]
    if weights:
        nodes.insert(0, onnx.helper.make_node("MatMul", ["x", "w"], ["h"]))
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9),
        tmp_path / "m.onnx",
    )
    with pytest.raises(RecipeError, match=message):
        cmrc.reduce(tmp_path / "m.onnx", [np.ones((8, 4), np.float32)])


def test_sizes_that_cannot_be_reached_are_replaced_by_some_that_can(tmp_path: Path) -> None:
    options = {**QUICK, "frontier": [0.8, 0.001], "work": tmp_path / "w"}
    result = cmrc.reduce(MODEL, TRAIN, macs=0.001, **options)
    (remark,) = [remark for remark in result.remarks if "is out of reach" in remark]
    floor = float(remark.split()[2])
    assert remark == (
        f"less than {floor:g} of the multiply-adds is out of reach: that much remains when all units that may be removed are removed"
    )
    assert [size.share for size in result.sizes][-1] == floor
    assert len(result.sizes) > 2
    assert not result.ready
    again = cmrc.reduce(MODEL, TRAIN, macs=0.001, **options)
    assert [size.share for size in again.sizes] == [size.share for size in result.sizes]


def test_a_size_that_a_goal_names_is_held_as_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What folding adds at run time is not foretold: where it carries a model over the goal, a smaller one is planned."""
    counted, options = Subject.macs_of, {**QUICK, "frontier": [0.8], "work": tmp_path / "w"}

    def with_more(self: Subject, host: Any) -> int:
        return counted(self, host) + (0 if host is self.program.host else 20_000)

    monkeypatch.setattr(Subject, "macs_of", with_more)
    missed = cmrc.reduce(MODEL, TRAIN, pick=0.8, **options)
    assert missed.measures.macs > 0.8 * missed.whole.macs, "nothing is added here: the test shows nothing"
    result = cmrc.reduce(MODEL, TRAIN, macs=0.8, **options)
    assert result.ready, result.verdict
    assert 0.7 * result.whole.macs < result.measures.macs <= 0.8 * result.whole.macs
    assert result.measures.quality != missed.measures.quality
    assert plan_digest(cmrc.Plan.load(tmp_path / "w" / "plan-macs-0.800.json")) == plan_digest(result.plan)
    again = cmrc.reduce(MODEL, TRAIN, macs=0.8, **options)
    assert again.measures == result.measures
    monkeypatch.setattr(Subject, "macs_of", lambda self, host: 10**6 if host is not self.program.host else 10**5)
    out_of_reach = cmrc.reduce(MODEL, TRAIN, macs=0.79, **{**options, "frontier": [0.79]})
    assert out_of_reach.verdict.startswith("not ready: macs 0.79 is out of reach"), out_of_reach.verdict


def test_a_file_that_grows_and_a_fast_model_that_answers_otherwise_are_said(reduction: cmrc.Reduction) -> None:
    quality = dataclasses.replace(reduction.measures.quality, agreement=Estimate(0.8, 0.7, 0.9))
    measures = dataclasses.replace(reduction.measures, bytes=reduction.whole.bytes + 3000, quality=quality)
    parts = {field.name: getattr(reduction, field.name) for field in dataclasses.fields(reduction)}
    grown = cmrc.Reduction(**{**parts, "measures": measures, "goals": Goals(macs=0.9)})
    percent = 100 * 3000 / reduction.whole.bytes
    assert f", a file that is {percent:.1f} % larger, " in grown.verdict
    assert grown.summary()[2][3].endswith(", larger")
    said = "\n".join(grown.notes())
    assert "the file is larger than the original by 3,000 bytes: what folding adds to the graph" in said
    assert "no quality was asked for: the small model gives other answers on 20.0 % of the held-out samples" in said
    assert "larger" not in reduction.verdict
    assert "no quality was asked for" not in "\n".join(reduction.notes())


def test_costs_are_those_at_the_sizes_of_the_data(tmp_path: Path) -> None:
    """A model of any height and width is not counted as if a picture had one pixel."""
    rng = np.random.default_rng(0)
    weights = {"w1": rng.normal(size=(16, 3, 3, 3)), "w2": rng.normal(size=(8, 16, 3, 3))}
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w1"], ["h"]),
        onnx.helper.make_node("Relu", ["h"], ["a"]),
        onnx.helper.make_node("Conv", ["a", "w2"], ["c"]),
        onnx.helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        onnx.helper.make_node("Flatten", ["p"], ["y"]),
    ]
    graph = onnx.helper.make_graph(
        nodes, "g", [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, "h", "w"])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 8])],
        [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )  # fmt: skip
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9),
        tmp_path / "m.onnx",
    )
    x = rng.normal(size=(80, 3, 12, 10)).astype(np.float32)
    result = cmrc.reduce(tmp_path / "m.onnx", [x], pick=0.6, frontier=[0.6], refit=False, timed=False)
    assert result.whole.macs == 10 * 8 * 16 * 27 + 8 * 6 * 8 * 144
    kept = 16 - sum(len(entry.units) for entry in result.lowered.plan.entries)
    assert 0 < result.measures.macs == kept * result.whole.macs // 16 <= 0.6 * result.whole.macs
