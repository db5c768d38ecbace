"""Plan files and annotations are somebody else's data: a valid plan comes out, or a PlanError that names the place."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import math
import shutil
import tracemalloc
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from program.bad_plans import BAD_ENTRIES, BAD_PLANS, BAD_TEXTS, BESIDE, FIX, WRITTEN
from safetensors.numpy import save
from torch import nn

import cmrc
from cmrc.errors import PlanError
from cmrc.ir.graph import Do
from cmrc.program.plan_entry import entry_from_json, entry_to_json, from_ranges, pack_text, to_ranges, unpack_text
from cmrc.strict_json import parse_json


@pytest.fixture(scope="module")
def program() -> cmrc.Program:
    torch.manual_seed(0)
    return cmrc.trace(nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 3)), (torch.ones(2, 4),))


def small_plan(program: cmrc.Program) -> cmrc.Plan:
    plan = cmrc.Plan(program, made={"by": "hand"}, scores={"1": np.arange(10.0)})
    plan.do("1", units=[0, 1, 2, 7], constant=[0.5, 1.0, 1.5, 2.0])
    return plan.do("1", units=[5], affine=cmrc.Affine([8, 6], [[1.0, -2.0]], [0.25]))


def wide_plan(program: cmrc.Program) -> cmrc.Plan:
    return cmrc.Plan(program).do("1", units=range(150), constant=np.linspace(-1, 1, 150))


@pytest.fixture(scope="module")
def document(program: cmrc.Program, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    small_plan(program).save(path)
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def with_value(document: Any, place: tuple[str | int, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    reduce(lambda part, key: part[key], place[:-1], changed)[place[-1]] = value
    return changed


def refusal(path: Path) -> PlanError:
    with pytest.raises(PlanError) as error:
        cmrc.Plan.load(path)
    return error.value


def same_entries(one: list[Do], other: list[Do]) -> bool:
    return len(one) == len(other) and all(
        (a.site, a.value, a.axis, tuple(a.units), tuple(a.parents)) == (b.site, b.value, b.axis, b.units, b.parents)
        and np.array_equal(a.constant, b.constant)
        and (a.weight is None) == (b.weight is None)
        and (a.weight is None or b.weight is None or np.array_equal(a.weight, b.weight))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("case", BAD_ENTRIES, ids=str)
def test_an_entry_that_is_no_do(document: dict[str, Any], tmp_path: Path, case: str) -> None:
    place, value, reason = BAD_ENTRIES[case]
    (tmp_path / "plan.json").write_text(json.dumps(with_value(document, place, value)))
    assert str(refusal(tmp_path / "plan.json")) == f"plan: {reason}\n  at plan.json: do[{place[1]}]\n  fix: {FIX}"


@pytest.mark.parametrize("case", BAD_PLANS, ids=str)
def test_a_file_that_is_no_plan(document: dict[str, Any], tmp_path: Path, case: str) -> None:
    place, value, reason, fix = BAD_PLANS[case]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(with_value(document, place, value)))
    assert str(refusal(path)) == f"plan: {reason}\n  at {path}\n  fix: {fix}"


@pytest.mark.parametrize("case", BAD_TEXTS, ids=str)
def test_a_text_that_is_no_plan(tmp_path: Path, case: str) -> None:
    content, reason = BAD_TEXTS[case]
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    refused = refusal(path)
    assert refused.reason.partition(": 1e")[0].partition(": inf")[0] == reason  # newer Pythons name the number
    assert (refused.at, refused.fix) == (str(path), WRITTEN)


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert str(refusal(path)) == (
        f"plan: cannot be read: No such file or directory\n  at {path}\n  fix: give the path of a plan file"
    )


def test_an_endless_file_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cmrc.program.plan_file.LARGEST_FILE", 1 << 20)
    assert refusal(Path("/dev/zero")).reason == "is larger than 1,048,576 bytes"


@pytest.mark.parametrize("constant", [[0.0], 0.0, [[0.0]]])
def test_a_huge_range_takes_no_memory(document: dict[str, Any], tmp_path: Path, constant: Any) -> None:
    entry = {"site": "1", "axis": 1, "units": "0:9000000000", "constant": constant}
    (tmp_path / "plan.json").write_text(json.dumps({**document, "do": [entry]}))
    tracemalloc.start()
    refused = refusal(tmp_path / "plan.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused.reason.endswith("for 9,000,000,000 units")
    assert peak < 4 << 20


def test_one_number_stands_for_all_units(program: cmrc.Program, document: dict[str, Any], tmp_path: Path) -> None:
    entry = {"site": "1", "value": "relu", "axis": 1, "units": "0:3", "constant": 0.5}
    (tmp_path / "plan.json").write_text(json.dumps({**document, "do": [entry]}))
    (read,) = cmrc.Plan.load(tmp_path / "plan.json").entries
    assert np.array_equal(read.constant, [0.5, 0.5, 0.5])


# ---------------------------------------------------------------- arrays beside the plan


def replace_arrays(folder: Path, data: bytes) -> Path:
    """Other arrays under their own right hash, and the plan that names them."""
    path = folder / "plan.json"
    document = json.loads(path.read_text())
    (folder / document["tensors"]).unlink()
    document["tensors"] = f"plan.{hashlib.sha256(data).hexdigest()[:12]}.safetensors"
    (folder / document["tensors"]).write_bytes(data)
    path.write_text(json.dumps(document))
    return folder / document["tensors"]


@pytest.fixture
def wide(program: cmrc.Program, tmp_path: Path) -> Path:
    wide_plan(program).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def arrays_of(path: Path) -> Path:
    return path.parent / json.loads(path.read_text())["tensors"]


def test_a_plan_that_is_saved_again_leaves_no_arrays_behind(wide: Path, program: cmrc.Program) -> None:
    before = arrays_of(wide)
    shutil.copy(wide, wide.with_name("copy.json"))
    left = before.with_name(f"{wide.stem}.0123456789ab.safetensors")  # as a save leaves it that is killed
    left.write_bytes(b"half")
    cmrc.Plan(program).do("1", units=range(150), constant=np.linspace(1, 2, 150)).save(wide)
    assert before.exists()  # the copy refers to it
    assert not left.exists()
    wide.with_name("copy.json").unlink()
    small_plan(program).save(wide)
    assert [path.name for path in wide.parent.iterdir()] == [wide.name]


def test_arrays_that_were_swapped_are_refused(wide: Path) -> None:
    arrays = arrays_of(wide)
    arrays.write_bytes(save({"do[0].constant": np.zeros(150)}))
    assert str(refusal(wide)) == (
        f"plan: its array file {arrays.name} is not the one that it was saved with\n  at {wide}\n  fix: {BESIDE}"
    )


def test_arrays_behind_a_link_out_of_the_folder_are_refused(wide: Path, tmp_path: Path) -> None:
    arrays, elsewhere = arrays_of(wide), tmp_path / "elsewhere"
    elsewhere.mkdir()
    arrays.rename(elsewhere / arrays.name)
    arrays.symlink_to(elsewhere / arrays.name)
    assert str(refusal(wide)) == (
        f"plan: its array file {arrays.name} is a link to outside the plan's folder\n  at {wide}\n  fix: {BESIDE}"
    )


def test_a_plan_behind_a_link_finds_its_arrays(wide: Path, program: cmrc.Program, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "plan.json"
    link.symlink_to(wide)
    assert same_entries(wide_plan(program).entries, cmrc.Plan.load(link).entries)
    small = wide_plan(program)
    small.entries[0].constant[:] = 1.0
    small.save(link)  # through the link: the arrays appear beside the plan itself
    assert link.is_symlink()
    assert arrays_of(wide).exists()
    assert same_entries(small.entries, cmrc.Plan.load(wide).entries)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"other": np.zeros(150)}, "the array 'do[0].constant' is not in the file beside the plan"),
        ({"do[0].constant": np.zeros(149)}, "the array 'do[0].constant' has shape [149], not [150]"),
        ({"do[0].constant": np.full(150, np.nan)}, "150 of the constants are NaN or infinite"),
    ],
)
def test_arrays_that_do_not_fit_the_entry(wide: Path, tensors: dict[str, Any], reason: str) -> None:
    replace_arrays(wide.parent, save(tensors))
    assert str(refusal(wide)) == f"plan: {reason}\n  at plan.json: do[0]\n  fix: {FIX}"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (save({"do[0].constant": np.zeros(150, np.float32)}), "do[0].constant is of type F32, not F64"),
        (save({"do[0].constant": np.zeros(150, np.int64)}), "do[0].constant is of type I64, not F64"),
    ],
)
def test_arrays_that_are_no_arrays_of_float64(wide: Path, data: bytes, reason: str) -> None:
    arrays = replace_arrays(wide.parent, data)
    assert (
        str(refusal(wide))
        == f"plan: its array file {arrays.name} cannot be read: {reason}\n  at {wide}\n  fix: {BESIDE}"
    )


def test_arrays_that_are_cut_short(wide: Path) -> None:
    arrays = replace_arrays(wide.parent, b"short")
    assert refusal(wide).reason.startswith(f"its array file {arrays.name} cannot be read: Error while deserializing")


def test_scores_that_are_infinite_stay_so(program: cmrc.Program, tmp_path: Path) -> None:
    plan = small_plan(program)
    plan.scores = {"1": np.array([1.0, -np.inf, *np.zeros(8)])}
    plan.save(tmp_path / "plan.json")
    assert np.array_equal(cmrc.Plan.load(tmp_path / "plan.json").scores["1"], plan.scores["1"])


@pytest.mark.parametrize("value", [math.nan, np.float32(1.0), {1, 2}])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(
    program: cmrc.Program, tmp_path: Path, value: Any
) -> None:
    plan = wide_plan(program)
    plan.made = {"value": value}
    with pytest.raises(PlanError, match="`made` cannot be written as JSON"):
        plan.save(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- annotations


BAD_ARRAYS: dict[str, tuple[Any, str]] = {
    "other keys": ({"float64": ""}, "an array must have the keys `float64` and `shape`"),
    "no text": ({"float64": 3, "shape": [1]}, "an array must have the keys `float64` and `shape`"),
    "no base64": ({"float64": "????", "shape": [1]}, "Only base64 data is allowed"),
    "a shape that does not fit": (
        {"float64": base64.b64encode(bytes(8)).decode(), "shape": [2]},
        "an array of 8 bytes cannot have shape [2]",
    ),
    "a shape that is negative": ({"float64": "", "shape": [-1]}, "[-1] is not the shape of an array"),
    "a shape of fractions": ({"float64": "", "shape": [1.0]}, "[1.0] is not the shape of an array"),
    "NaN": (
        {"float64": base64.b64encode(np.array([np.nan]).tobytes()).decode(), "shape": [1]},
        "1 of the constants are NaN or infinite",
    ),
    "text": ("0.5", "'0.5' is not a number, but an array of numbers is needed"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS, ids=str)
def test_an_annotation_that_is_no_do(case: str) -> None:
    packed, reason = BAD_ARRAYS[case]
    with pytest.raises(PlanError) as error:
        entry_from_json({"site": "1", "axis": 1, "units": "3", "constant": packed}, unpack_text, "annotation: do[0]")
    assert str(error.value) == f"plan: {reason}\n  at annotation: do[0]\n  fix: {FIX}"


def test_an_annotation_comes_back_as_it_was(program: cmrc.Program) -> None:
    for entry in (*small_plan(program).entries, *wide_plan(program).entries):
        packed = json.loads(json.dumps(entry_to_json(entry, pack_text)))
        assert same_entries([entry], [entry_from_json(packed, unpack_text, "annotation: do[0]")])


# ---------------------------------------------------------------- fuzzing

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["0:3", "7", "0:99999999999", "1", "relu", "do[0].constant", "../x", 10**30, -1, 0.5]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def places(document: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, part in pairs:
        yield (*at, key)
        yield from places(part, (*at, key))


def plan_or_refusal(path: Path, program: cmrc.Program) -> None:
    """A plan that can be saved and read again, and that a model takes or refuses; or a PlanError."""
    try:
        plan = cmrc.Plan.load(path)
    except PlanError:
        return
    plan.save(path)
    assert same_entries(plan.entries, cmrc.Plan.load(path).entries)
    try:
        program.require(plan)
    except cmrc.CmrcError:
        return
    cmrc.lower(program, plan, residue="keep")


@given(data=st.data())
def test_any_change_of_a_plan_is_a_plan_or_refused(
    data: st.DataObject, document: dict[str, Any], program: cmrc.Program, tmp_path_factory: pytest.TempPathFactory
) -> None:
    changed = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(places(changed))))
        action = data.draw(st.sampled_from(["value", "value", "drop", "key"]))
        parent = reduce(lambda part, key: part[key], place[:-1], changed)
        if action == "value":
            parent[place[-1]] = data.draw(JSON)
        elif action == "drop":
            del parent[place[-1]]
        elif isinstance(parent, dict):
            parent[data.draw(st.text(max_size=6))] = parent.pop(place[-1])
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(json.dumps(changed))
    plan_or_refusal(path, program)


def spliced(text: bytes, place: int, length: int, put: bytes) -> bytes:
    return text[:place] + put + text[place + length :]


@given(place=st.integers(0, 4000), length=st.integers(0, 6), put=st.binary(max_size=6), which=st.integers(0, 1))
def test_any_change_of_a_plans_bytes_is_a_plan_or_refused(
    place: int, length: int, put: bytes, which: int, program: cmrc.Program, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"bytes{which}"
    folder.mkdir(exist_ok=True)
    path = folder / "plan.json"
    [small_plan, wide_plan][which](program).save(path)
    targets = [path] if which == 0 else [path, arrays_of(path)]
    for target in targets:
        before = target.read_bytes()
        target.write_bytes(spliced(before, place % len(before), length, put))
        plan_or_refusal(path, program)
        target.write_bytes(before)
        [small_plan, wide_plan][which](program).save(path)


@given(data=st.data())
def test_any_change_of_an_annotation_is_a_do_or_refused(data: st.DataObject, program: cmrc.Program) -> None:
    entry = data.draw(st.sampled_from([*small_plan(program).entries, *wide_plan(program).entries]))
    document = entry_to_json(entry, pack_text)
    place = data.draw(st.sampled_from(list(places(document))))
    changed = with_value(document, place, data.draw(JSON))
    try:
        read = entry_from_json(changed, unpack_text, "annotation: do[0]")
    except PlanError:
        return
    plan = cmrc.Plan(program, [read])
    try:
        plan.check(program)
    except cmrc.CmrcError:
        return
    cmrc.lower(program, plan, residue="keep")


@pytest.mark.parametrize("index", [(), (0,), (0, 1, 2), (1, 5, 6, 9), (5, 1)])
def test_ranges_round_trip(index: tuple[int, ...]) -> None:
    assert from_ranges(to_ranges(index)) == index


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode) | JSON.map(lambda d: json.dumps(d).encode()))
def test_json_is_read_by_the_letter_or_refused(data: bytes) -> None:
    try:
        document = parse_json(data)
    except ValueError:
        return
    assert json.loads(json.dumps(document, allow_nan=False)) == document


BAD_ANNOTATIONS = {
    "{": "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    "5": "a record is not the number of a do and the do",
    "[5]": "a record is not the number of a do and the do",
    '[["0", "relu", {}]]': "a record is not the number of a do and the do",
    '[[true, "relu", {}]]': "a record is not the number of a do and the do",
    '[[0, "relu", []]]': "a record is not the number of a do and the do",
    '[[0, "relu", {"axis": NaN}]]': "NaN is not a number of JSON",
    '[[0, "relu", {"axis": 1, "axis": 2}]]': "the key 'axis' stands twice in one object",
    "[" * 100_000: "it is nested more than 64 levels deep",
}


@pytest.mark.parametrize("text", BAD_ANNOTATIONS, ids=lambda text: text[:40])
def test_a_model_whose_annotation_is_no_plan(program: cmrc.Program, text: str, tmp_path: Path) -> None:
    """On both hosts: as the metadata of an ONNX node, and as what torch.export keeps of a node."""
    import onnx

    path = tmp_path / "model.onnx"
    cmrc.lower(program, small_plan(program)).save(path)
    model = onnx.load(path)
    model.graph.node[0].metadata_props.add(key="cmrc.do", value=text)
    fx_text = text.replace(', "relu"', "")
    exported = torch.export.export(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.ones(2, 4),))
    node = next(node for node in exported.graph.nodes if node.op == "call_function")
    node.meta["custom"] = {"cmrc.do": fx_text}
    for traced in (cmrc.trace(model), cmrc.trace(exported)):
        with pytest.raises(cmrc.CmrcError) as error:
            _ = traced.plan
        assert error.value.reason.endswith(f"cannot be read: {BAD_ANNOTATIONS[text]}")
        assert error.value.fix == "remove it"
