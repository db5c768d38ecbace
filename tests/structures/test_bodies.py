"""Units replaced inside the bodies of If, Loop and Scan, against the same model with the replacement written into the body.

The reference shares nothing with the compiler: where a value is clamped, the model is built with `v := v A + c` as two more nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hosts.onnx.lowering import random
from onnx import TensorProto, helper, numpy_helper, parser
from tolerances import EXACT_F32, distance

import cmrc
from cmrc.errors import HostError, ResidueError, SiteError, StatsError
from cmrc.ir.bodies import without_bodies
from cmrc.ir.graph import Array
from cmrc.ir.text import parse, to_text

SEEN = 1e-3  # by how much a replacement must move the outputs
FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
READ, UNITS = 5, 8


@dataclass(frozen=True)
class Held:
    """Units of a value, and what they become: constants, or an affine function of parents."""

    units: Sequence[int]
    constants: Sequence[float]
    parents: Sequence[int] = ()
    weight: Any = None

    def request(self) -> dict[str, Any]:
        if self.weight is None:
            return {"units": self.units, "constant": self.constants}
        return {"units": self.units, "affine": cmrc.Affine(self.parents, self.weight, self.constants)}

    def arrays(self, size: int) -> tuple[Array, Array]:
        """A and c of v := v A + c."""
        matrix, bias = np.eye(size, dtype=np.float32), np.zeros(size, np.float32)
        matrix[:, list(self.units)], bias[list(self.units)] = 0.0, self.constants
        if self.weight is not None:
            matrix[np.ix_(list(self.parents), list(self.units))] = np.asarray(self.weight).T
        return matrix, bias


Clamps = Mapping[str, Held]
CONSTANTS, AFFINE = Held([1, 4], [0.4, -0.3]), Held([1, 4], [0.1, -0.2], [0, 5], [[0.5, -0.4], [0.3, 0.2]])


def info(name: str, kind: int, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def nodes(lines: str, clamps: Clamps, stored: dict[str, Array], units: int = UNITS) -> list[onnx.NodeProto]:
    """Nodes from text, with the clamps behind the values that they name."""
    result = []
    for line in filter(None, map(str.strip, lines.splitlines())):
        node = parser.parse_node(line)
        do = clamps.get(node.output[0])
        result.append(node)
        if do is not None:
            name = node.output[0]
            node.output[0] = f"{name}.free"
            stored[f"{name}.A"], stored[f"{name}.c"] = do.arrays(units)
            result.append(helper.make_node("MatMul", [f"{name}.free", f"{name}.A"], [f"{name}.moved"]))
            result.append(helper.make_node("Add", [f"{name}.moved", f"{name}.c"], [name]))
    return result


def tensors(stored: Mapping[str, Array]) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(array, name) for name, array in stored.items()]


def finished(
    lines: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], stored: Mapping[str, Array], *outputs: str
) -> onnx.ModelProto:
    graph = helper.make_graph(lines, "main", inputs, [info(name, FLOAT, None) for name in outputs], tensors(stored))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


X = info("x", FLOAT, ["N", READ])
MLP = "h = Gemm(s, w1, b1)\na = Relu(h)\nm = MatMul(a, w2)"


def loop(clamps: Clamps, *, declared: bool = True, captured: bool = True) -> onnx.ModelProto:
    """x, and then as often as asked x := x + mlp(x); weights lie in the body, around it, and in a Constant; a value is captured."""
    outer = {"v1": random(READ, UNITS), "v2": random(UNITS, READ), "w1": random(READ, UNITS, seed=1, scale=0.5)}
    inner = {"w2": random(UNITS, READ, seed=2, scale=0.3)}
    body = [helper.make_node("Constant", [], ["b1"], value=numpy_helper.from_array(random(UNITS, seed=3)))]
    body += nodes(MLP, clamps, inner)
    body += nodes(f"t = Add(m, {'side' if captured else 's'})\nnext = Add(s, t)\ngo = Identity(c)", clamps, inner)
    shape = ["N", READ] if declared else None
    graph = helper.make_graph(
        body, "body", [info("i", INT, []), info("c", BOOL, []), info("s", FLOAT, shape)],
        [info("go", BOOL, []), info("next", FLOAT, shape), info("a", FLOAT, None)], tensors(inner),
    )  # fmt: skip
    main = nodes("g = MatMul(x, v1)\nu = Relu(g)\nside = MatMul(u, v2)", clamps, outer)
    main.append(helper.make_node("Loop", ["trips", "", "x"], ["last", "every"], name="loop", body=graph))
    main += nodes("y = Tanh(last)\nz = ReduceSum<keepdims=0>(every, axes)", clamps, outer)
    outer["axes"] = np.array([2])
    return finished(main, [X, info("trips", INT, [])], outer, "y", "z")


def scan(clamps: Clamps) -> onnx.ModelProto:
    """A state that is read with each row of a sequence."""
    outer = {"w1": random(READ, UNITS, seed=1), "r": random(READ, READ, seed=4), "b1": random(UNITS, seed=3)}
    inner = {"w2": random(UNITS, READ, seed=2, scale=0.3)}
    body = nodes(f"f = MatMul(state, r)\ns = Add(f, row)\n{MLP}\nnext = Tanh(m)\nout = Identity(m)", clamps, inner)
    graph = helper.make_graph(
        body, "body", [info("state", FLOAT, None), info("row", FLOAT, None)],
        [info("next", FLOAT, None), info("out", FLOAT, None)], tensors(inner),
    )  # fmt: skip
    main = [helper.make_node("Scan", ["begin", "rows"], ["last", "y"], name="scan", body=graph, num_scan_inputs=1)]
    inputs = [info("begin", FLOAT, ["N", READ]), info("rows", FLOAT, ["T", "N", READ])]
    return finished(main, inputs, outer, "last", "y")


def branch(name: str, seed: int, clamps: Clamps, *, nested: bool = False) -> onnx.GraphProto:
    """An MLP; or an MLP beside an If over two of them. Branches side by side have values and weights of the same names."""
    stored = {"w1": random(READ, UNITS, seed=seed), "w2": random(UNITS, READ, seed=seed + 1)}
    own = {key.removeprefix(f"{name}."): do for key, do in clamps.items() if key.startswith(f"{name}.")}
    text = "s = Add(x, side)\nh = Gemm(s, w1, b)\na = Relu(h)\nm = MatMul(a, w2)"
    if "." in name:  # a name may not be hidden by one of an inner graph
        stored = {f"{key}i": array for key, array in stored.items()}
        text = "si = Add(x, side)\nhi = Gemm(si, w1i, b)\nai = Relu(hi)\nmi = MatMul(ai, w2i)"
    lines = nodes(text, own, stored)
    if nested:
        stored["k"] = random(READ, READ, seed=seed + 2)
        inner = [branch(f"{name}.{each}", seed + 10 * i, clamps) for i, each in enumerate(("p", "q"), 1)]
        lines.append(
            helper.make_node("If", ["deep"], ["d"], name=f"{name}_inner", then_branch=inner[0], else_branch=inner[1])
        )
        lines += nodes("e = MatMul(d, k)\nm2 = Add(m, e)", own, stored)
    result = "m2" if nested else "mi"
    return helper.make_graph(lines, name, [], [info(result, FLOAT, None)], tensors(stored))


def conditional(clamps: Clamps) -> onnx.ModelProto:
    """Two branches, each with an If inside, that read a value around them."""
    outer = {"v1": random(READ, UNITS), "v2": random(UNITS, READ), "b": random(UNITS, seed=9)}
    main = nodes("g = MatMul(x, v1)\nu = Relu(g)\nside = MatMul(u, v2)", clamps, outer)
    branches = [branch(name, 20 * i, clamps, nested=True) for i, name in enumerate(("t", "f"), 1)]
    main.append(
        helper.make_node("If", ["wide"], ["y0"], name="choice", then_branch=branches[0], else_branch=branches[1])
    )
    main += nodes("y = Tanh(y0)", clamps, outer)
    return finished(main, [X, info("wide", BOOL, []), info("deep", BOOL, [])], outer, "y")


def fed(inputs: Mapping[str, Sequence[Any]]) -> list[dict[str, Array]]:
    """A batch of each kind."""
    keys = list(inputs)
    return [dict(zip(keys, (np.asarray(v) for v in row), strict=True)) for row in zip(*inputs.values(), strict=True)]


ROWS = random(3, READ, seed=7)
LOOPS = fed({"x": [ROWS, ROWS, random(1, READ)], "trips": [4, 1, 2]})
SCANS = fed({"begin": [ROWS, random(1, READ)], "rows": [random(4, 3, READ, seed=8), random(2, 1, READ, seed=8)]})
CHOICES = fed({"x": [ROWS] * 4, "wide": [True, True, False, False], "deep": [True, False, True, False]})

Build = Callable[[Clamps], onnx.ModelProto]


def check(
    build: Build,
    clamps: Clamps,
    sites: Mapping[str, str],
    batches: Sequence[Mapping[str, Array]],
    gone: Mapping[str, int],
) -> None:
    """Lowered, clamped, saved and annotated models against the one that was built with the clamps."""
    program = cmrc.trace(build({}))
    plan = cmrc.Plan(program)
    for name, do in clamps.items():
        plan.do(sites[name], **do.request())
    lowered = cmrc.lower(program, plan)
    literal = onnxruntime.InferenceSession(build(clamps).SerializeToString())
    moved = 0.0
    for batch in batches:
        want = literal.run(None, dict(batch))
        for got in (lowered.host.run(batch), lowered.clamped.run(batch)):
            assert max(map(distance, got, want)) <= EXACT_F32
        moved = max(moved, *map(distance, program.run(batch), want))
        assert lowered.check(batch).holds
    assert moved > SEEN
    shapes = {name: leaf.shape for name, leaf in lowered.host.graph.leaves().items()}
    for weight, axis in gone.items():
        before = program.graph.leaves()[weight].shape
        assert shapes[weight] == tuple(n - 2 * (i == axis) for i, n in enumerate(before))
    assert lowered.report.after.parameters < lowered.report.before.parameters
    assert parse(to_text(lowered.graph), lowered.graph.leaves()) == lowered.graph


IN_LOOP = {"a": "loop/body/a", "u": "u"}


@pytest.mark.parametrize("do", [CONSTANTS, AFFINE], ids=["constants", "affine"])
@pytest.mark.parametrize("declared", [True, False])
def test_units_of_a_loop(do: Held, declared: bool) -> None:
    """`every` collects the units, so the do at `a` would stay: it is read by `h` of the body alone in the other test."""
    program = cmrc.trace(loop({}, declared=declared))
    with pytest.raises(ResidueError, match=r"loop.*Loop"):
        cmrc.lower(program, cmrc.Plan(program).do("loop/body/a", **do.request()))
    kept = cmrc.lower(program, cmrc.Plan(program).do("loop/body/a", **do.request()), residue="keep")
    literal = onnxruntime.InferenceSession(loop({"a": do}, declared=declared).SerializeToString())
    for batch in LOOPS:
        assert max(map(distance, kept.host.run(batch), literal.run(None, dict(batch)))) <= EXACT_F32


@pytest.mark.parametrize("do", [CONSTANTS, AFFINE], ids=["constants", "affine"])
@pytest.mark.parametrize("site", ["f", "s"])
def test_units_of_a_scan_that_only_its_body_reads(do: Held, site: str) -> None:
    del site
    check(scan, {"a": do}, {"a": "scan/body/a"}, SCANS, {"scan/body/w2": 0, "w1": 1, "b1": 0})


def test_constants_before_the_function_pass_it() -> None:
    check(scan, {"h": CONSTANTS}, {"h": "scan/body/h"}, SCANS, {"scan/body/w2": 0, "w1": 1, "b1": 0})


def plain_loop(clamps: Clamps, **options: Any) -> onnx.ModelProto:
    """The loop without the collected units."""
    proto = loop(clamps, **options)
    node = next(node for node in proto.graph.node if node.op_type == "Loop")
    del node.output[1:]
    del node.attribute[0].g.output[2:]
    del proto.graph.node[-1], proto.graph.output[1:]
    return proto


@pytest.mark.parametrize("do", [CONSTANTS, AFFINE], ids=["constants", "affine"])
@pytest.mark.parametrize("declared", [True, False])
def test_units_of_a_loop_and_of_what_it_captures(do: Held, declared: bool) -> None:
    clamps = {"a": do, "u": do}
    check(lambda c: plain_loop(c, declared=declared), clamps, IN_LOOP, LOOPS,
          {"loop/body/w2": 0, "w1": 1, "v1": 1, "v2": 0})  # fmt: skip


def test_a_value_that_only_a_body_reads_folds_into_the_body() -> None:
    """The units of `u` end in a product that stands inside."""

    def build(clamps: Clamps) -> onnx.ModelProto:
        proto = plain_loop(clamps)
        (product,) = [node for node in proto.graph.node if node.output[0] == "side"]
        proto.graph.node.remove(product)
        body = next(node for node in proto.graph.node if node.op_type == "Loop").attribute[0].g
        body.node.insert(0, product)
        return proto

    check(build, {"u": AFFINE}, {"u": "u"}, LOOPS, {"v1": 1, "v2": 0})


@pytest.mark.parametrize("do", [CONSTANTS, AFFINE], ids=["constants", "affine"])
def test_units_of_both_branches_of_nested_ifs(do: Held) -> None:
    inner = {f"{name}.{each}.ai": f"choice/{place}/{name}_inner/{way}/ai"
             for name, place in (("t", "then"), ("f", "else")) for each, way in (("p", "then"), ("q", "else"))}  # fmt: skip
    sites = {"t.a": "choice/then/a", "f.a": "choice/else/a", "u": "u", **inner}
    gone = {f"{site.rpartition('/')[0]}/w2{'i' * site.endswith('i')}": 0 for site in sites.values() if "/" in site}
    check(conditional, dict.fromkeys(sites, do), sites, CHOICES, gone)


def test_one_branch_leaves_the_other_alone() -> None:
    check(
        conditional, {"t.a": CONSTANTS}, {"t.a": "choice/then/a"}, CHOICES, {"choice/then/w1": 1, "choice/then/w2": 0}
    )
    program = cmrc.trace(conditional({}))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("choice/then/a", **CONSTANTS.request()))
    before, after = program.graph.leaves(), lowered.host.graph.leaves()
    unchanged = [name for name in before if name.startswith("choice/else/")]
    assert unchanged
    for name in unchanged:
        assert np.array_equal(before[name].load(), after[name].load())


def test_a_weight_around_that_two_bodies_read_gets_a_private_copy() -> None:
    """`b` is read by all four MLPs: one of them becomes narrower."""
    program = cmrc.trace(conditional({}))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("choice/then/a", **CONSTANTS.request()))
    sizes = sorted(leaf.shape for name, leaf in lowered.host.graph.leaves().items() if name.split(".")[0] == "b")
    assert sizes == [(UNITS - 2,), (UNITS,)]


def test_what_a_body_is_given_is_not_selected() -> None:
    """The units of a loop's own state are read anew in every run."""
    program = cmrc.trace(scan({}))
    with pytest.raises(ResidueError) as caught:
        cmrc.lower(program, cmrc.Plan(program).do("scan/body/state", units=[1], constant=0.4, axis=1))
    assert "a Scan gives it to its body anew in every run" in str(caught.value)
    program = cmrc.trace(plain_loop({}))
    with pytest.raises(ResidueError, match=r"Loop is not an op that replacements can pass"):
        cmrc.lower(program, cmrc.Plan(program).do("loop/body/next", units=[1], constant=0.4))


def test_sites_are_listed_by_their_places() -> None:
    program = cmrc.trace(conditional({}))
    names = [site.name for site in program.list_sites()]
    assert {"choice/then/a", "choice/else/a", "choice/then/t_inner/else/ai", "u"} <= set(names)
    assert [site.name for site in program.list_sites("choice/then/*inner*/ai")] == [
        "choice/then/t_inner/then/ai", "choice/then/t_inner/else/ai",
    ]  # fmt: skip
    with pytest.raises(SiteError, match=r"near matches: choice/then/a, choice/else/a"):
        program.find("a")


def test_plans_annotations_and_saved_models_know_the_places(tmp_path: Path) -> None:
    program = cmrc.trace(conditional({}))
    plan = cmrc.Plan(program).do("choice/then/a", **AFFINE.request()).do("choice/else/a", **CONSTANTS.request())
    lowered = cmrc.lower(program, plan)
    plan.save(tmp_path / "plan.json")
    program.annotate(plan).save(tmp_path / "annotated.onnx")
    lowered.save(tmp_path / "small.onnx")
    small = cmrc.trace(tmp_path / "small.onnx")
    assert {site.name for site in program.list_sites()} <= {site.name for site in small.list_sites()}
    for batch in CHOICES:
        want = lowered.host.run(batch)[0]
        assert np.array_equal(cmrc.lower(program, tmp_path / "plan.json").host.run(batch)[0], want)
        assert np.array_equal(cmrc.lower(tmp_path / "annotated.onnx").host.run(batch)[0], want)
        assert np.array_equal(small.run(batch)[0], want)


def test_the_fingerprint_knows_what_is_inside() -> None:
    one, other = (cmrc.trace(conditional(clamps)).fingerprint for clamps in ({}, {"t.a": CONSTANTS}))
    assert one.digest != other.digest
    assert one.digest == cmrc.trace(conditional({})).fingerprint.digest


def test_constants_that_are_computed_inside_are_parameters() -> None:
    """A weight that a body turns and takes the root of is a parameter, and the body keeps its expression where nothing changes."""

    def build(clamps: Clamps) -> onnx.ModelProto:
        proto = plain_loop(clamps)
        body = next(node for node in proto.graph.node if node.op_type == "Loop").attribute[0].g
        next(tensor for tensor in body.initializer if tensor.name == "w2").name = "raw"
        lines = ["w3 = Transpose<perm=[1,0]>(raw)", "w4 = Erf(w3)", "w2 = Transpose<perm=[1,0]>(w4)"]
        for i, line in enumerate(lines):
            body.node.insert(i, parser.parse_node(line))
        return proto

    program = cmrc.trace(build({}))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("loop/body/a", **CONSTANTS.request()))
    literal = onnxruntime.InferenceSession(build({"a": CONSTANTS}).SerializeToString())
    for batch in LOOPS:
        assert distance(lowered.host.run(batch)[0], literal.run(None, dict(batch))[0]) <= EXACT_F32


def test_a_graph_is_run_with_its_bodies_inside() -> None:
    program = cmrc.trace(conditional({}))
    closed = without_bodies(program.graph)
    assert [node.kind for node in closed.nodes] == ["linear", "relu", "linear", "If", "tanh"]
    node = closed.nodes[3]
    assert node.values() == ["wide", "x", "side", "deep"]


def three_runs() -> onnx.ModelProto:
    proto = plain_loop({})
    trips = next(i for i, value in enumerate(proto.graph.input) if value.name == "trips")
    del proto.graph.input[trips]
    proto.graph.initializer.append(numpy_helper.from_array(np.array(3), "trips"))
    return proto


def by_its_rows() -> onnx.ModelProto:
    """The branches, chosen by the sign of what comes in."""
    proto = conditional({})
    del proto.graph.input[1:]
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(0), "zero"))
    lines = ["mean = ReduceMean<keepdims=0>(x)", "wide = Greater(mean, zero)", "deep = Less(mean, zero)"]
    for i, line in enumerate(lines):
        proto.graph.node.insert(i, parser.parse_node(line))
    return proto


def test_the_model_is_not_cut_inside_a_body() -> None:
    program, data = cmrc.trace(three_runs()), [{"x": ROWS}]
    reason = r"it is inside loop \(Loop\), which runs as one op, so the model cannot be cut there"
    lowered = cmrc.lower(program, cmrc.Plan(program).do("loop/body/a", **CONSTANTS.request()))
    with pytest.raises(SiteError, match=reason):
        cmrc.verify(program, lowered, data)


def test_statistics_are_those_of_every_run() -> None:
    program, x = cmrc.trace(three_runs()), random(20, READ)
    stats = cmrc.calibrate(program, [{"x": x[:12]}, {"x": x[12:]}], sites="loop/body/a")
    w = {name.removeprefix("loop/body/"): leaf.load() for name, leaf in program.graph.leaves().items()}
    side, state, rows = np.maximum(x @ w["v1"], 0) @ w["v2"], x, []
    for _ in range(3):
        rows.append(np.maximum(state @ w["w1"] + w["b1"], 0))
        state = state + rows[-1] @ w["w2"] + side
    (site,) = stats.sites.values()
    assert site.count == 60
    assert distance(site.mean, np.concatenate(rows).mean(0)) <= EXACT_F32
    outputs = program.run({"x": x}, taps=["side", "loop/body/a"])
    assert distance(outputs[1], side) <= EXACT_F32
    assert distance(outputs[2], np.concatenate(rows)) <= EXACT_F32


def test_statistics_of_a_branch_are_those_of_the_batches_that_take_it() -> None:
    program, x = cmrc.trace(by_its_rows()), np.abs(random(20, READ))
    stats = cmrc.calibrate(program, [{"x": x[:12]}, {"x": -x[12:]}], sites=["choice/then/a", "choice/else/a"])
    assert [stats[name].count for name in ("choice/then/a", "choice/else/a")] == [12, 8]
    w = {name: leaf.load() for name, leaf in program.graph.leaves().items()}
    side = np.maximum(x[:12] @ w["v1"], 0) @ w["v2"]
    then = np.maximum((x[:12] + side) @ w["choice/then/w1"] + w["b"], 0)
    assert distance(stats["choice/then/a"].mean, then.mean(0)) <= EXACT_F32


def test_a_default_plan_replaces_units_inside() -> None:
    program, x = cmrc.trace(three_runs()), random(60, READ)
    plan = cmrc.plan(program, data=[{"x": x}], keep=0.5)
    assert {name: site["kept"] for name, site in plan.made["sites"].items()} == {"u": 4, "loop/body/a": 4}
    lowered = cmrc.lower(program, plan)
    assert lowered.check({"x": x}).holds
    branches, x = cmrc.trace(by_its_rows()), np.abs(x)
    plan = cmrc.plan(branches, data=[{"x": x}, {"x": -x}], keep=0.5)
    inner = {"choice/then/t_inner/else/ai", "choice/else/f_inner/then/ai"}  # the other two are never run
    assert plan.made["sites"].keys() == {"u", "choice/then/a", "choice/else/a", *inner}
    assert all("the statistics have no rows" in reason for reason in plan.made["left_out"].values())
    lowered = cmrc.lower(branches, plan)
    assert all(lowered.check({"x": rows}).holds for rows in (x, -x))


def test_what_runs_a_different_number_of_times_is_left_out_by_name() -> None:
    """A branch inside a loop: which runs take it is not known."""
    proto = three_runs()
    loop_node = next(node for node in proto.graph.node if node.op_type == "Loop")
    body = loop_node.attribute[0].g
    arms = [branch(f"t.{name}", 10 * i, {}) for i, name in enumerate(("p", "q"), 1)]
    proto.graph.initializer.append(numpy_helper.from_array(random(UNITS, seed=9), "b"))
    added = next(node for node in body.node if node.output[0] == "next")
    added.input[1] = "d"
    body.node.insert(0, helper.make_node("If", ["c"], ["d0"], name="inner", then_branch=arms[0], else_branch=arms[1]))
    body.node.insert(1 + len(body.node) - 3, helper.make_node("Add", ["d0", "t"], ["d"]))
    plan = cmrc.plan(cmrc.trace(proto), data=[{"x": random(40, READ)}], keep=0.5)
    assert plan.made["sites"].keys() == {"u", "loop/body/a"}
    assert plan.made["left_out"].keys() == {"loop/body/inner/then/ai", "loop/body/inner/else/ai"}
    assert all("it is inside loop (Loop)" in reason for reason in plan.made["left_out"].values())


def test_gradients_end_at_a_body() -> None:
    """Training says so, and so do statistics with gradients."""
    program, data = cmrc.trace(three_runs()), [{"x": random(32, READ)}] * 4
    with pytest.raises(StatsError, match="gradients do not reach it: it is inside loop"):
        cmrc.calibrate(program, data, sites="loop/body/a", need=["curvature"], loss="logit")
    lowered = cmrc.lower(program, cmrc.plan(program, data=data, keep=0.5))
    with pytest.raises(
        HostError, match=r"no gradient reaches the parameters that lowering changed: it stops at loop \(Loop\)"
    ):
        cmrc.recover(program, lowered, data, steps=5)
