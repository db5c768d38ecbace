"""Plans from statistics: presets, counts, budgets, schedules, recipes, records, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command import cli
from nets import Net, Tokens, activations, data, exported, mlp, seeded, traced
from tolerances import EXACT_F64, distance

import cmrc
from cmrc.errors import HostError, ObjectiveError, RecipeError, SiteError, StatsError
from cmrc.ir.axes import complement
from cmrc.planning import fits
from cmrc.planning.recipe import PRESETS

DIGITS = Path(__file__).parents[2] / "examples"
WIDE = (5, 16, 12, 4)
FAINT = 4  # a unit that is not dead on the data
HEADS = [name for name in PRESETS if name.startswith("heads")]


@pytest.fixture(scope="module")
def program() -> cmrc.Program:
    return mlp(WIDE)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in HEADS])
def test_every_preset_gives_a_plan_that_lowers(preset: str, program: cmrc.Program, tmp_path: Path) -> None:
    x, y = data(80, 5)
    plans = [cmrc.plan(program, data=[(x[:50], y[:50]), (x[50:], y[50:])], preset=preset, keep=0.5) for _ in range(2)]
    for i, plan in enumerate(plans):
        plan.save(tmp_path / f"{i}.json")
    first, second = ((tmp_path / f"{i}.json").read_text().replace(f'"{i}.', '"') for i in range(2))
    assert first == second  # bit for bit
    assert [(e.site, len(e.units)) for e in plans[0].entries] == [("acts.0", 8), ("acts.1", 6)]
    lowered = cmrc.lower(program, plans[0])
    assert lowered.check((x[:8],)).holds
    assert lowered.report.after.parameters < 0.5 * lowered.report.before.parameters
    loaded = cmrc.Plan.load(tmp_path / "0.json")
    assert loaded.made == plans[0].made
    assert loaded.made["recipe"]["preset"] == preset
    assert (loaded.made["samples"], loaded.made["sites"]["acts.0"]["kept"]) == (80, 8)
    assert distance(loaded.scores["acts.1"], plans[0].scores["acts.1"]) == 0.0


@pytest.mark.parametrize("preset", HEADS)
@pytest.mark.parametrize("positions", ["all", "each"])
def test_heads_become_vectors_or_slabs(preset: str, positions: str) -> None:
    program, (x, y) = traced(seeded(Tokens()), 3, 6), data(30, 3, 6)
    name = next(site.name for site in program.sites(folds=False) if site.op == "attention")
    plan = cmrc.plan(program, data=[(x, y)], sites=[name], preset=preset, keep=1, positions=positions)
    lowered = cmrc.lower(program, plan)
    assert lowered.check((x[:8],)).holds
    assert plan.entries[0].constant.shape == ((1, 1, 3, 3) if positions == "each" else (1, 1, 1, 3))


def test_a_slab_of_means_is_the_mean_at_each_position() -> None:
    program, (x, y) = traced(seeded(Tokens()), 3, 6), data(30, 3, 6)
    plan = cmrc.plan(program, data=[(x, y)], sites=["act"], preset="vbp", keep=5, positions="each")
    units = list(plan.entries[0].units)
    expected = activations(program, x, "act").mean(0)[:, units]
    assert plan.entries[0].constant.shape == (1, 3, 3)
    assert distance(plan.entries[0].constant[0], expected) < EXACT_F64


def test_counts_follow_keep_minimum_multiple_and_protection(program: cmrc.Program) -> None:
    x, y = data(40, 5)
    stats = cmrc.calibrate(program, [(x, y)], need="scatter")

    def counts(**options: object) -> dict[str, int]:
        plan = cmrc.plan(program, stats, **options)
        return {entry.site: len(entry.units) for entry in plan.entries}

    assert counts(keep=0.25) == {"acts.0": 12, "acts.1": 9}
    assert counts(keep=5) == {"acts.0": 11, "acts.1": 7}
    assert counts(keep={"acts.0": 4, "*.1": 0.75}) == {"acts.0": 12, "acts.1": 3}
    assert counts(keep={"acts.1": 0.5}) == {"acts.1": 6}
    assert counts(keep=0.25, minimum=6) == {"acts.0": 10, "acts.1": 6}
    assert counts(keep=0.3, multiple_of=4) == {"acts.0": 8, "acts.1": 8}
    assert counts(keep=0.3, multiple_of={"acts.1": 6}) == {"acts.0": 11, "acts.1": 6}
    assert counts(keep=0.5, protect=["acts.0"]) == {"acts.1": 6}
    assert counts(keep=1.0) == {}


@pytest.mark.parametrize(("channels", "kept"), [(24, 12), (36, 20), (136, 72)])
def test_channels_of_convolutions_are_kept_by_four_and_many_by_eight(channels: int, kept: int) -> None:
    from torch import nn

    model = seeded(nn.Sequential(nn.Conv2d(2, channels, 3), nn.ReLU(), nn.Conv2d(channels, 3, 1), nn.Flatten()))
    program = traced(model, 2, 4, 4)
    x, _ = data(10, 2, 4, 4)
    plan = cmrc.plan(program, data=[x], sites=["1"], keep=0.5)
    assert channels - len(plan.entries[0].units) == kept


@pytest.mark.parametrize("of", ["parameters", "macs", "bytes"])
@pytest.mark.parametrize("preset", ["joint", "cmr-logit", "cmr-const"])
def test_a_budget_is_met_and_spent_where_it_hurts_least(of: str, preset: str, program: cmrc.Program) -> None:
    x, y = data(80, 5)
    plan = cmrc.plan(program, data=[(x, y)], preset=preset, budget={"of": of, "amount": 0.6})
    after = getattr(cmrc.lower(program, plan).report.after, of)
    before = getattr(program.cost(), of)
    assert after <= 0.6 * before
    if preset != "cmr-const":  # on random labels the loss falls without most units, and what costs nothing goes
        assert after > 0.5 * before
    counts = {entry.site: len(entry.units) for entry in plan.entries}
    absolute = cmrc.plan(program, data=[(x, y)], preset=preset, budget={"of": of, "amount": int(0.6 * before)})
    assert {entry.site: len(entry.units) for entry in absolute.entries} == counts
    with pytest.raises(RecipeError, match="cannot be met: with all units removed that may be removed, it is"):
        cmrc.plan(program, data=[(x, y)], preset=preset, budget={"of": of, "amount": 0.01})


def written(plan: cmrc.Plan) -> list[tuple[object, ...]]:
    """The do's of a plan, bit by bit."""
    arrays = [(entry.constant, entry.weight) for entry in plan.entries]
    bits = [[None if array is None else array.tobytes() for array in pair] for pair in arrays]
    return [(entry.site, entry.units, entry.parents, *some) for entry, some in zip(plan.entries, bits, strict=True)]


def test_without_a_word_each_site_gets_what_suits_it(program: cmrc.Program) -> None:
    """Joint selection, fitted in order; constants where affine maps do not fold; single scores where no scatter is known."""
    x, y = data(150, 5)
    plain = cmrc.plan(program, data=[(x, y)], keep=0.5)
    named = cmrc.plan(program, data=[(x, y)], preset="joint", keep=0.5, recompute="all")
    assert written(plain) == written(named)
    stepped, fitted = (
        cmrc.plan(program, data=[(x, y)], preset=preset, keep=0.5, schedule=[0.75], recompute=recompute)
        for preset, recompute in (("auto", "auto"), ("joint", "fits"))
    )
    assert written(stepped) == written(fitted)  # a schedule needs the ranks of all sites before
    assert plain.made["recipe"]["preset"] == "auto"
    assert [site["preset"] for site in plain.made["sites"].values()] == ["joint", "joint"]
    assert "preset" not in named.made["sites"]["acts.0"]
    once = cmrc.plan(program, data=iter([(x, y)]), keep=0.5)  # which cannot be read again
    assert written(once) == written(cmrc.plan(program, data=[(x, y)], preset="joint", keep=0.5))
    stats = cmrc.calibrate(program, [(x, y)])
    scores = cmrc.plan(program, stats, keep=0.5)
    assert written(scores) == written(cmrc.plan(program, stats, preset="cmr-logit", keep=0.5))
    by_hand = cmrc.plan(program, data=[(x, y)], objective="variance", keep=0.5)
    assert written(by_hand) == written(cmrc.plan(program, data=[(x, y)], preset="vbp", keep=0.5))


def test_without_a_word_heads_become_affine_maps_and_stops_constants() -> None:
    tokens = traced(seeded(Tokens()), 3, 6)
    heads = next(site for site in tokens.sites() if site.units == 2)
    x, _ = data(60, 3, 6)
    plan = cmrc.plan(tokens, data=[x], sites=[heads.name, "act"], keep=0.5)
    assert {name: site["preset"] for name, site in plan.made["sites"].items()} == {
        heads.name: "joint",
        "act": "joint",
    }
    cmrc.lower(tokens, plan)
    before = traced(seeded(Net((5, 8, 6, 4))), 5)  # the first layer's own output: a ReLU lets constants pass only
    x, _ = data(60, 5)
    stopped = cmrc.plan(before, data=[x], sites=["layers.0"], keep=0.5)
    assert stopped.made["sites"]["layers.0"]["preset"] in ("reconstruction", "cmr-logit", "reconstruction-task")
    cmrc.lower(before, stopped)


def test_a_budget_takes_from_the_site_that_matters_less() -> None:
    """One layer with many copies of the same units, another where all differ: the copies go."""
    import torch
    from nets import Net

    model = seeded(Net((5, 24, 16, 4)), 2)
    with torch.no_grad():
        model.layers[0].weight[8:] = model.layers[0].weight[:8].repeat(2, 1)
        model.layers[0].bias[8:] = model.layers[0].bias[:8].repeat(2)
    program, (x, y) = traced(model, 5), data(200, 5)
    plan = cmrc.plan(program, data=[(x, y)], preset="joint", budget={"of": "parameters", "amount": 0.5})
    counts = {entry.site: len(entry.units) for entry in plan.entries}
    assert counts["acts.0"] > 3 * counts.get("acts.1", 0)


def test_latency_is_measured_on_onnx_models(program: cmrc.Program) -> None:
    x, _ = data(40, 5)
    onnx = exported(program)
    plan = cmrc.plan(onnx, data=[x], preset="joint", budget={"of": "latency", "amount": 1000})
    assert plan.made["recipe"]["budget"] == {"of": "latency", "amount": 1000}
    # a second is more than enough as it is: only units that never vary go
    assert sum(site["predicted"] for site in plan.made["sites"].values()) < EXACT_F64
    with pytest.raises(HostError, match="latency is measured under onnxruntime"):
        cmrc.plan(program, data=[x], preset="joint", budget={"of": "latency", "amount": 0.9})


def test_a_schedule_scores_anew_and_keeps_what_is_gone(program: cmrc.Program) -> None:
    x, y = data(150, 5)
    batches = [(x, y)]
    half = cmrc.plan(program, data=batches, sites=["acts.0"], preset="cmr-const", keep=0.75)
    whole = cmrc.plan(program, data=batches, sites=["acts.0"], preset="cmr-const", keep=0.5, schedule=[0.75])
    entry, earlier = whole.entries[0], half.entries[0]
    assert set(earlier.units) < set(entry.units)
    for unit, constant in zip(earlier.units, earlier.constant, strict=True):
        assert entry.constant[entry.units.index(unit)] == constant
    # The later ones were scored in the network without the earlier ones.
    stats = cmrc.calibrate(program, batches, sites="acts.0", need=("curvature", "range"), host=program.clamped(half))
    from cmrc.planning import objectives

    scores = objectives.score("task", objectives.Context(program, stats["acts.0"]))
    left = complement(earlier.units, 16)
    expected = set(left[np.argsort(scores.score[left])[:4]].tolist())
    assert set(entry.units) - set(earlier.units) == expected
    joint = cmrc.plan(program, data=batches, preset="joint", keep=0.5, schedule=[0.75])
    assert cmrc.lower(program, joint).check((x[:8],)).holds


def test_recomputed_statistics_are_those_after_the_replacements_upstream(program: cmrc.Program) -> None:
    x, y = data(150, 5)
    plain = cmrc.plan(program, data=[(x, y)], preset="cmr-logit", keep=0.25)
    anew = cmrc.plan(program, data=[(x, y)], preset="cmr-logit", keep=0.25, recompute="all")
    first, second = anew.entries
    assert np.array_equal(first.constant, plain.entries[0].constant)
    upstream = cmrc.Plan(program, [first])
    value = program.find("acts.1")[0].value
    seen = program.clamped(upstream).run([x], [value])[-1]
    assert distance(second.constant, seen.mean(0)[list(second.units)]) < EXACT_F64
    assert distance(second.constant, activations(program, x, "acts.1").mean(0)[list(second.units)]) > 1e-3


def test_means_of_an_earlier_step_follow_what_is_replaced_upstream(program: cmrc.Program) -> None:
    x, y = data(150, 5)
    steps = cmrc.plan(program, data=[(x, y)], preset="cmr-logit", keep=0.25, schedule=[0.6], recompute="all")
    first, second = steps.entries
    seen = program.clamped(cmrc.Plan(program, [first])).run([x], [program.find("acts.1")[0].value])[-1]
    assert distance(second.constant, seen.mean(0)[list(second.units)]) < EXACT_F64


def test_affine_maps_that_are_fitted_anew_make_up_for_the_drift_upstream(program: cmrc.Program) -> None:
    """The fit against its definition: W a − W_K a'_K by W_S (B a'_K + β), up to the ridges of G and of the drift."""
    x, y = data(300, 5)
    once = cmrc.plan(program, data=[(x, y)], preset="joint", keep=4)
    anew = cmrc.plan(program, data=[(x[:100], y[:100]), (x[100:], y[100:])], preset="joint", keep=4, recompute="fits")
    assert [e.units for e in once.entries] == [e.units for e in anew.entries]
    z = program.run([x])[0]
    errors = [float(((cmrc.lower(program, plan).host.run([x])[0] - z) ** 2).mean()) for plan in (once, anew)]
    assert errors[1] < errors[0]
    first, second = anew.entries
    value, weight = program.find("acts.1")[0].value, program.graph.leaves()["layers.2.weight"].load()
    moved, a = program.clamped(cmrc.Plan(program, [first])).run([x], [value])[-1], activations(program, x, "acts.1")
    units, keep = list(second.units), list(second.parents)
    gram, deviation = weight.T @ weight, moved.std(0)
    own, reach = gram[np.ix_(units, units)], gram.diagonal()[units] * deviation[units] ** 2
    damping = 0.01 * np.maximum(reach, fits.FLOOR * reach.max()) / np.maximum(deviation[units] ** 2, 1e-30)
    makeup = np.linalg.solve(own + np.diag(damping), gram[np.ix_(units, keep)])
    drift = a[:, units] - moved[:, units] + (a[:, keep] - moved[:, keep]) @ makeup.T
    parents = (moved[:, keep] - moved[:, keep].mean(0)) / deviation[keep]

    def fitted(target: np.ndarray, ridge: float) -> np.ndarray:
        normal = parents.T @ parents / 300 + ridge * np.eye(4)
        return target.mean(0) + parents @ np.linalg.solve(normal, parents.T @ target / 300)

    def slopes(rows: slice, target: np.ndarray, ridge: float) -> np.ndarray:
        """Of some rows alone, by the parents themselves."""
        own = moved[rows][:, keep] - moved[rows][:, keep].mean(0)
        normal = own.T @ own / len(own) + ridge * np.diag(own.var(0))
        return np.linalg.solve(normal, own.T @ target[rows] / len(own))

    def held_out(ridge: float) -> float:
        error, halves = 0.0, (slice(0, 100), slice(100, 300))
        for rows, other in (halves, halves[::-1]):
            chosen = slopes(rows, moved[:, units], 1e-6)
            if np.isfinite(ridge):
                chosen = chosen + slopes(rows, drift, ridge)
            left = (moved[:, units] + drift)[other] - moved[other][:, keep] @ chosen
            error += float((((left - left.mean(0)) @ weight[:, units].T) ** 2).sum(1).mean())
        return error

    best = min(fits.DRIFT_RIDGES, key=held_out)
    assert np.isfinite(best)
    rebuilt = moved[:, keep] @ second.weight.T + second.constant
    assert distance(rebuilt, fitted(moved[:, units], 1e-6) + fitted(drift, best)) < EXACT_F64
    others = [ridge for ridge in fits.DRIFT_RIDGES if np.isfinite(ridge) and ridge != best]
    assert all(distance(fitted(drift, best), fitted(drift, ridge)) > 1e-6 for ridge in others)
    one = cmrc.plan(program, data=[(x, y)], preset="joint", keep=4, recompute="fits").entries[
        1
    ]  # a batch has no halves
    rebuilt = moved[:, keep] @ one.weight.T + one.constant
    assert distance(rebuilt, fitted(moved[:, units], 1e-6) + fitted(drift, 4 / 300)) < EXACT_F64
    stiff = cmrc.plan(program, data=[(x, y)], preset="joint", keep=4, recompute="fits", drift_ridge=3.0).entries[1]
    rebuilt = moved[:, keep] @ stiff.weight.T + stiff.constant
    assert distance(rebuilt, fitted(moved[:, units], 1e-6) + fitted(drift, 3.0)) < EXACT_F64


def test_a_unit_that_hardly_reaches_the_next_op_is_not_moved_without_bound() -> None:
    model = seeded(Net(WIDE))
    with torch.no_grad():
        model.layers[2].weight[:, FAINT] *= 1e-18
    (x, y), program = data(300, 5), traced(model, 5)
    plan = cmrc.plan(program, data=[(x, y)], preset="joint", keep=4, recompute="fits")
    entry, a = plan.entries[1], activations(program, x, "acts.1")
    row = entry.weight[entry.units.index(FAINT)]
    assert np.abs(row * a.std(0)[list(entry.parents)]).max() < 100 * a[:, FAINT].std()


def test_rescaled_units_change_no_fit_after_replacements_upstream(program: cmrc.Program) -> None:
    x, _ = data(300, 5)
    upstream = cmrc.Plan(program).do("acts.0", units=[0, 1, 2], constant=0.5)
    stats = cmrc.calibrate(program, [x], sites="acts.1", need=("scatter", "drift"), host=program.clamped(upstream))
    site, weight = stats["acts.1"], program.graph.leaves()["layers.2.weight"].load().copy()
    weight[:, FAINT] *= 1e-9
    scale, units, keep = 10.0 ** np.arange(-6, 6), [1, 2, FAINT, 5, 8], [0, 3, 6, 7, 9, 10, 11]
    plain = fits.affine(site, units, gram=weight.T @ weight)
    for name, power in (("mean", scale), ("origin", scale), ("squares", scale**2)):
        site.arrays[name] *= power
    for name in ("scatter", "cross"):
        site.arrays[name] *= np.outer(scale, scale)
    rescaled = fits.affine(site, units, gram=(weight / scale).T @ (weight / scale))
    assert distance(rescaled.weight * scale[keep] / scale[units, None], plain.weight) < 1e-6
    assert distance(rescaled.bias / scale[units], plain.bias) < 1e-6


def test_joint_selection_with_affine_folds_distorts_least(program: cmrc.Program) -> None:
    x, y = data(400, 5)
    stats = cmrc.calibrate(program, [(x, y)], sites="acts.1", need=("scatter", "curvature", "range"))
    z = program.run([x])[0]

    def distortion(**options: object) -> float:
        plan = cmrc.plan(program, stats, sites=["acts.1"], keep=4, **options)
        return float(((cmrc.lower(program, plan).host.run([x])[0] - z) ** 2).mean())

    joint = distortion(preset="joint")
    for other in ("vbp", "cmr-logit", "magnitude", "random", "taylor"):
        assert joint <= distortion(preset=other, replace="affine") + EXACT_F64
        assert joint < distortion(preset=other)


def test_what_is_missing_is_said(program: cmrc.Program) -> None:
    x, _ = data(10, 5)
    stats = cmrc.calibrate(program, [x])
    with pytest.raises(StatsError, match="there are no data to calibrate on"):
        cmrc.plan(program, preset="vbp")
    with pytest.raises(StatsError, match="there are no data to calibrate on"):
        cmrc.plan(program, stats, preset="vbp", schedule=[0.75])
    with pytest.raises(StatsError, match="the statistics have no scatter"):
        cmrc.plan(program, stats, preset="joint")
    with pytest.raises(RecipeError, match="every site is protected"):
        cmrc.plan(program, stats, protect=["acts.*"])
    with pytest.raises(cmrc.CmrcError, match="the statistics were made for another model"):
        cmrc.plan(mlp((5, 8, 12, 4)), stats)
    with pytest.raises(SiteError, match="nope"):
        cmrc.plan(program, stats, preset="vbp", keep={"nope": 0.5})


def test_a_site_that_cannot_be_scored_is_left_out_with_its_reason() -> None:
    program, (x, y) = traced(seeded(Tokens()), 3, 6), data(30, 3, 6)
    heads = next(site.name for site in program.sites(folds=False) if site.op == "attention")
    plan = cmrc.plan(program, data=[(x, y)], preset="merge", keep=0.5, sites=["scaled_*", "act"])
    assert plan.made["left_out"] == {heads: "replace: merge is for units of one number each"}
    assert heads not in plan.made["sites"]
    assert [entry.site for entry in plan.entries] == ["act"]
    with pytest.raises(ObjectiveError) as caught:
        cmrc.plan(program, data=[(x, y)], preset="merge", keep=0.5, sites=[heads])
    assert str(caught.value) == (
        f"objective: %{heads}: replace: merge is for units of one number each\n"
        "  fix: use replace: affine without interchange"
    )


def test_sites_that_nobody_names_are_those_of_the_statistics(program: cmrc.Program) -> None:
    x, _ = data(40, 5)
    stats = cmrc.calibrate(program, [x], sites="acts.1")
    assert list(cmrc.plan(program, stats, preset="vbp").made["sites"]) == ["acts.1"]
    with pytest.raises(StatsError, match=r"no statistics for site 'acts\.0'"):
        cmrc.plan(program, stats, preset="vbp", sites=["acts.0"])


# ---------------------------------------------------------------- the command line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    digits = np.load(DIGITS / "digits_train.npz")
    np.savez("data.npz", image=digits["images"][:400], labels=digits["labels"][:400])
    return tmp_path


def test_from_a_model_and_data_to_a_smaller_model(folder: Path) -> None:
    model = str(DIGITS / "digits.onnx")
    answer = cli("plan", model, "--data", "data.npz", "--preset", "joint", "--keep", "act3=0.5", "--sites", "act3",
               "-o", "plan.json", "--plot", "scores.png")  # fmt: skip
    assert answer.exit_code == 0, answer.output
    assert "joint: objective logit, selection joint, replacement affine; seed 0" in answer.stdout
    assert (folder / "scores.png").read_bytes().startswith(b"\x89PNG")
    shown = cli("plan", "show", "plan.json")
    assert "affine function of 64 units" in shown.stdout
    assert "joint: objective logit" in shown.stdout
    assert json.loads(cli("plan", "show", "plan.json", "--json").stdout)["made"]["sites"]["act3"]["kept"] == 64
    assert cli("lower", model, "plan.json", "-o", "small.onnx").exit_code == 0
    assert cli("check", model, "small.onnx", "plan.json").exit_code == 0


def test_statistics_are_made_once_and_used_often(folder: Path) -> None:
    model = str(DIGITS / "digits.onnx")
    done = cli(
        "calibrate",
        model,
        "--data",
        "data.npz",
        "--need",
        "scatter",
        "--sites",
        "act*",
        "-o",
        "stats.safetensors",
        "--batch",
        "100",
    )
    assert done.exit_code == 0, done.output
    assert "4 sites, 400 samples" in done.stdout
    (folder / "recipe.yaml").write_text("preset: cmr-logit\nsites: [act3, act4]\nkeep: 0.5\n")
    for out, options in (("a.json", ["--preset", "vbp"]), ("b.json", []), ("c.json", ["--seed", "0"])):
        assert (
            cli("plan", model, "--stats", "stats.safetensors", "--recipe", "recipe.yaml", "-o", out, *options).exit_code
            == 0
        )
    same = cli("plan", "diff", "b.json", "c.json")
    assert (same.exit_code, same.stdout.strip()) == (0, "the plans are the same")
    apart = cli("plan", "diff", "a.json", "b.json")
    assert apart.exit_code == 1
    assert "Jaccard of kept" in apart.stdout
    document = json.loads(cli("plan", "diff", "a.json", "b.json", "--json").stdout)
    row = document["sites"][0]
    kept = [set(complement(cmrc.Plan.load(f"{name}.json").entries[0].units, 128).tolist()) for name in "ab"]
    assert (document["same"], row["site"]) == (False, "act3")
    assert row["jaccard"] == pytest.approx(len(kept[0] & kept[1]) / len(kept[0] | kept[1]))


def test_budgets_and_errors_on_the_command_line(folder: Path) -> None:
    model = str(DIGITS / "digits.onnx")
    done = cli("plan", model, "--data", "data.npz", "--sites", "act3", "--sites", "act4", "--budget", "parameters=0.8",
               "-o", "plan.json", "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["recipe"]["budget"] == {"of": "parameters", "amount": 0.8}
    bad = cli("plan", model, "--data", "data.npz", "--keep", "half", "-o", "plan.json")
    assert bad.exit_code == 2
    assert "'half' is not a number" in bad.stderr
    assert cli("plan", model, "-o", "plan.json").exit_code == 2
    assert cli("plan", "--help").exit_code == 0


def test_a_plot_needs_scores(folder: Path) -> None:
    from cmrc.planning.plots import plot_scores

    program = mlp(WIDE)
    with pytest.raises(cmrc.CmrcError, match="the plan has no scores to plot"):
        plot_scores(cmrc.Plan(program), "scores.png")
    x, _ = data(20, 5)
    with pytest.raises(cmrc.CmrcError, match="there is no folder"):
        plot_scores(cmrc.plan(program, data=[x]), folder / "no such folder" / "scores.png")


def test_plans_that_differ_in_values_or_kind_are_told_apart(program: cmrc.Program) -> None:
    from cmrc.program.difference import difference

    first = cmrc.Plan(program).do("acts.0", units=[0, 1], constant=[1.0, 2.0])
    second = cmrc.Plan(program).do("acts.0", units=[0, 1], constant=[1.0, 2.5])
    third = cmrc.Plan(program).do("acts.0", units=[0, 1], affine=cmrc.Affine([2], [[1.0], [2.0]]))
    fourth = cmrc.Plan(program).do("acts.0", units=[0, 1], affine=cmrc.Affine([2], [[1.0], [2.25]]))
    assert difference(first, first) == []
    assert difference(first, second)[0]["values"] == 0.5
    assert difference(first, third)[0]["values"] is None
    assert difference(third, fourth)[0]["values"] == 0.25


def test_maps_without_a_useful_parent_are_constants() -> None:
    """Where nothing varies, no unit says anything about another."""
    program = mlp()
    x = np.ones((40, int(program.graph.inputs[0].shape[1])))
    plan = cmrc.plan(
        program, data=[(x, np.zeros(40, np.int64))], preset="cmr-affine", parents=1, sites=["acts.1"], keep=0.5
    )
    (entry,) = plan.entries
    assert entry.weight is None
    assert cmrc.lower(program, plan).check((x,)).holds
