"""A plan that was interrupted continues to the same bits; a checkpoint of another run is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nets import Branches, data, exported, mlp, seeded, traced

import cmrc
from cmrc.errors import CmrcError, PlanError, RecipeError, StatsError
from cmrc.planning import probe, progress, stream

WIDE = (5, 16, 12, 4)
SITES = ("act_a", "act_b", "act_c", "act_early")


class Killed(BaseException):
    """What ends a process from outside."""


def parts(seed: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = data(60, 5, seed=seed)
    return [(x[:20], y[:20]), (x[20:50], y[20:50]), (x[50:], y[50:])]


def content(plan: cmrc.Plan, folder: Path, name: str) -> bytes:
    """Of the plan's files."""
    plan.save(folder / f"{name}.json")
    text = (folder / f"{name}.json").read_bytes().replace(f'"{name}.'.encode(), b'"')
    return text + b"".join(path.read_bytes() for path in folder.glob(f"{name}.*.safetensors"))


def kill_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt after so many sites were saved."""
    left = iter(range(count))
    save = progress.Progress.save_site

    def save_site(*arguments: Any) -> None:
        save(*arguments)
        if next(left, None) is None:
            raise Killed

    monkeypatch.setattr(progress.Progress, "save_site", save_site)


RECIPES: dict[str, dict[str, Any]] = {
    "constants": {"preset": "cmr-logit", "keep": 0.5},
    "optimal with a schedule": {"preset": "cmr-const", "keep": 0.4, "schedule": [0.7]},
    "fits": {"preset": "joint", "keep": 0.4, "recompute": "fits"},
    "all": {"preset": "joint-task", "keep": 0.4, "recompute": "all"},
    "scored again": {"preset": "cmr-logit", "keep": 0.4, "recompute": "all", "schedule": [0.7]},
    "weighted": {"preset": "cmr-affine", "keep": 0.5},
    "nothing of one": {"preset": "joint", "keep": {"acts.1": 0.5}, "recompute": "fits"},
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_an_interrupted_plan_continues_to_the_same_bits(
    name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, folder = mlp(WIDE), tmp_path / "checkpoint"
    expected = content(cmrc.plan(program, data=parts(), **RECIPES[name]), tmp_path, "whole")
    with monkeypatch.context() as patch:
        kill_after(count, patch)
        if count < 2 or "schedule" in RECIPES[name]:
            with pytest.raises(Killed):
                cmrc.plan(program, data=parts(), **RECIPES[name], checkpoint=folder)
            assert len(list(folder.glob("site-*"))) == count + 1
    with monkeypatch.context() as patch:  # the statistics are not gathered again
        if folder.exists():
            patch.setattr(progress.Progress, "calibration", property(lambda self: pytest.fail("calibrated again")))
        resumed = cmrc.plan(program, data=parts(), **RECIPES[name], checkpoint=folder)
    assert content(resumed, tmp_path, "resumed") == expected
    assert not folder.exists()


@pytest.mark.parametrize("host", ["fx", "onnx"])
@pytest.mark.parametrize("budget", [2**30, 6000, 0])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_stream_continues_to_the_same_bits(
    host: str, budget: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of the batches it could hold."""
    program = traced(seeded(Branches()), 5)
    program = program if host == "fx" else exported(program)
    monkeypatch.setattr(stream.Stream.__init__, "__defaults__", (budget, *stream.Stream.__init__.__defaults__[1:]))
    asked = {"data": [x for x, _ in parts()], "sites": list(SITES), "preset": "joint", "keep": 4, "recompute": "fits"}
    expected = content(cmrc.plan(program, **asked), tmp_path, "whole")
    with monkeypatch.context() as patch:
        kill_after(count, patch)
        with pytest.raises(Killed):
            cmrc.plan(program, **asked, checkpoint=tmp_path / "checkpoint")
    assert content(cmrc.plan(program, **asked, checkpoint=tmp_path / "checkpoint"), tmp_path, "resumed") == expected


def test_an_interrupted_calibration_of_a_plan_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, folder = mlp(WIDE), tmp_path / "checkpoint"
    asked = {"data": parts(), "preset": "joint", "keep": 0.5}
    monkeypatch.setattr("cmrc.statistics.checkpoint.SHARE", 0)
    monkeypatch.setattr("cmrc.statistics.checkpoint.Checkpoint.__post_init__", lambda self: None)  # due at once

    def watch(batches: Any, _: int | None) -> Any:
        for i, batch in enumerate(batches):
            if i == 2:
                raise Killed
            yield batch

    with pytest.raises(Killed):
        cmrc.plan(program, **asked, checkpoint=folder, watch=watch)
    assert [path.name.split("-")[0] for path in folder.iterdir()] == ["calibration"]
    resumed = cmrc.plan(program, **asked, checkpoint=folder)
    assert content(resumed, tmp_path, "a") == content(cmrc.plan(program, **asked), tmp_path, "b")


def test_plans_from_statistics_have_checkpoints_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, folder = mlp(WIDE), tmp_path / "checkpoint"
    stats = cmrc.calibrate(program, parts(), need="scatter")
    with monkeypatch.context() as patch:
        kill_after(0, patch)
        with pytest.raises(Killed):
            cmrc.plan(program, stats, preset="joint", checkpoint=folder)
    other = cmrc.calibrate(program, parts(seed=2), need="scatter")
    with pytest.raises(PlanError, match="the checkpoint was written for another model, recipe or data"):
        cmrc.plan(program, other, preset="joint", checkpoint=folder)
    resumed = cmrc.plan(program, stats, preset="joint", checkpoint=folder)
    assert content(resumed, tmp_path, "a") == content(cmrc.plan(program, stats, preset="joint"), tmp_path, "b")


@pytest.mark.parametrize("change", ["recipe", "data", "order", "model"])
def test_a_checkpoint_of_another_run_is_refused(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, folder = mlp(WIDE), tmp_path / "checkpoint"
    asked: dict[str, Any] = {"data": parts(), "preset": "joint", "keep": 0.5, "recompute": "fits"}
    with monkeypatch.context() as patch:
        kill_after(0, patch)
        with pytest.raises(Killed):
            cmrc.plan(program, **asked, checkpoint=folder)
    changed = {"recipe": {"keep": 0.4}, "data": {"data": parts(seed=2)}, "order": {"data": parts()[::-1]}}.get(change)
    other = mlp(WIDE, seed=5) if change == "model" else program
    with pytest.raises(PlanError) as caught:
        cmrc.plan(other, **{**asked, **(changed or {})}, checkpoint=folder)
    assert caught.value.reason == "the checkpoint was written for another model, recipe or data"
    assert (caught.value.at, caught.value.fix) == (
        str(folder / "statistics-0.safetensors"),
        "delete the folder to start again, or give another one",
    )


def test_a_broken_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, folder = mlp(WIDE), tmp_path / "checkpoint"
    with monkeypatch.context() as patch:
        kill_after(0, patch)
        with pytest.raises(Killed):
            cmrc.plan(program, data=parts(), checkpoint=folder)
    path = folder / "site-0-0.safetensors"
    whole = path.read_bytes()
    for broken in (
        b"",
        whole[:100],
        whole[:-8],
        whole.replace(b"let_go", b"let_no"),
        whole.replace(b'"order"', b'"other"'),
    ):
        path.write_bytes(broken)
        with pytest.raises(PlanError, match="the checkpoint cannot be read"):
            cmrc.plan(program, data=parts(), checkpoint=folder)


def test_what_a_checkpoint_cannot_do_is_said(tmp_path: Path) -> None:
    program = mlp(WIDE)
    with pytest.raises(StatsError, match="a plan with a checkpoint reads its data more than once"):
        cmrc.plan(program, data=iter(parts()), checkpoint=tmp_path / "checkpoint")
    with pytest.raises(RecipeError, match="a checkpoint is for one plan, and certify makes several"):
        cmrc.plan(program, data=parts(), certify="iia>=0.5", held_out=parts(2), checkpoint=tmp_path / "checkpoint")
    (tmp_path / "file").touch()
    with pytest.raises(CmrcError, match="cannot make the folder of the checkpoint"):
        cmrc.plan(program, data=parts(), checkpoint=tmp_path / "file")


@pytest.mark.parametrize("when", ["the probes of sites", "the probes of candidates", "the first site"])
def test_an_interrupted_budget_is_not_probed_again(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, folder = mlp(WIDE), tmp_path / "checkpoint"
    asked: dict[str, Any] = {"data": parts(), "preset": "joint", "budget": {"of": "parameters", "amount": 0.5}}
    measured: list[int] = []
    measure = probe.LossProbe._measured

    def counted(self: probe.LossProbe, plans: Any, race: bool) -> list[float]:
        measured.append(len(plans))
        return measure(self, plans, race)

    monkeypatch.setattr(probe.LossProbe, "_measured", counted)
    expected = content(cmrc.plan(program, **asked), tmp_path, "whole")
    runs = len(measured)
    assert runs == 2  # sites one by one, then candidates
    done = {"the probes of sites": 1, "the probes of candidates": 2, "the first site": 2}[when]
    with monkeypatch.context() as patch:
        if when == "the first site":
            kill_after(0, patch)
        else:
            save = progress.Progress._save_numbers

            def saved(self: progress.Progress, name: str, numbers: Any) -> None:
                save(self, name, numbers)
                if len(list(folder.glob("losses-*.json"))) == done:
                    raise Killed

            patch.setattr(progress.Progress, "_save_numbers", saved)
        with pytest.raises(Killed):
            cmrc.plan(program, **asked, checkpoint=folder)
    measured.clear()
    resumed = cmrc.plan(program, **asked, checkpoint=folder)
    assert len(measured) == runs - done
    assert content(resumed, tmp_path, "resumed") == expected
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2", "cannot be read"),
        ('{"asked": "another", "numbers": [1, 2]}', "another model, recipe or data"),
        ('{"asked": "another", "numbers": ["1"]}', "cannot be read"),
    ],
)
def test_a_checkpoint_of_counts_that_is_not_this_runs_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "counts.json").write_text(text)
    with pytest.raises(PlanError, match=reason):
        cmrc.plan(mlp(WIDE), data=parts(), preset="joint", keep=0.5, checkpoint=folder)


def test_losses_are_those_of_the_plans_that_were_measured(tmp_path: Path) -> None:
    program = mlp(WIDE)
    site = program.sites(folds=False)[0].value
    one, other = (cmrc.Plan(program).do(site, units=[unit], constant=0.5) for unit in (0, 1))
    kept = progress.Progress(tmp_path, "asked")
    kept.save_losses([one], [0.25])
    assert kept.load_losses([one]) == [0.25]
    assert kept.load_losses([other]) is None
    assert kept.load_losses([one, other]) is None
