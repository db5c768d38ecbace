"""Recovery on both hosts: closer to the original, never worse, the same bits from a seed, resumable, honest about what it is."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nets import Convs, exported, seeded

import cmrc
from cmrc.errors import FileError, InputError
from cmrc.recovery.lessons import Pool
from cmrc.recovery.parameters import compared, folded, trainable
from cmrc.recovery.recover import RecoveryRun, Round
from tests.command import cli

EXAMPLE = Path(__file__).parents[2] / "examples"


@cache
def prepared(host: str) -> tuple[cmrc.Program, cmrc.Lowered, np.ndarray]:
    model = seeded(Convs(), 3).float()
    x = normal(160, 0)
    program = cmrc.trace(model, (torch.from_numpy(x),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    program = program if host == "fx" else exported(program)
    plan = cmrc.Plan(program).do("act1", units=[0, 1], constant=0.0)
    return program, cmrc.lower(program, plan), x


def normal(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, size=(count, 2, 4, 4)).astype(np.float32)


def apart(program: cmrc.Program, model: cmrc.Lowered, x: np.ndarray) -> float:
    want, got = program.host.run([x])[0], model.host.run([x])[0]
    p, q = (torch.from_numpy(z).log_softmax(-1) for z in (want, got))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("host", ["fx", "onnx"])
@pytest.mark.parametrize("train", ["all", "folded"])
def test_a_recovered_model_is_closer_to_the_original(host: str, train: Any) -> None:
    program, lowered, x = prepared(host)
    rounds: list[Round] = []
    recovered = cmrc.recover(program, lowered, [x], steps=60, train=train, tell=rounds.append)
    test = normal(400, 1)
    before, after = apart(program, lowered, test), apart(program, recovered, test)
    assert after < (0.7 if train == "all" else 0.9) * before
    recovery = recovered.recovery
    assert recovery is not None
    assert recovery.after < recovery.before == rounds[0].began
    assert recovery.after == min(each.held_out for each in rounds) == rounds[-1].best
    assert rounds[-1].share == recovery.steps / 60
    assert recovery.steps > 50  # it stops where nothing more is expected
    assert (recovery.samples, recovery.held_out) == (144, 16)
    assert lowered.recovery is None
    assert apart(program, lowered, test) == before  # the model that was given is as it was
    check = recovered.check([x[:8]])
    assert not check.holds
    assert "compared are the plan and a recovered model" in str(check)
    assert lowered.check([x[:8]]).holds
    result = cmrc.verify(program, recovered, [x[:100]], swaps=50)
    assert result.plain.agreement.value > 0.7


def test_hosts_recover_alike() -> None:
    """The same steps from the same seed, by two ways to compute them."""
    results = {}
    for host in ("fx", "onnx"):
        program, lowered, x = prepared(host)
        recovered = cmrc.recover(program, lowered, [x], steps=10, values=0)
        results[host] = recovered.recovery
    assert results["fx"] is not None
    assert results["onnx"] is not None
    assert results["fx"].before == pytest.approx(results["onnx"].before, rel=1e-5)


@pytest.mark.parametrize("host", ["fx", "onnx"])
def test_the_same_seed_gives_the_same_bits_also_after_an_interruption(host: str, tmp_path: Path) -> None:
    program, lowered, x = prepared(host)
    options: dict[str, Any] = {"steps": 12, "seed": 5}
    whole = cmrc.recover(program, lowered, [x], **options)
    assert np.array_equal(whole.host.run([x])[0], cmrc.recover(program, lowered, [x], **options).host.run([x])[0])

    class Stop(Exception):
        pass

    def stop(round: Round) -> None:
        if round.number == 5:
            raise Stop

    path = tmp_path / "run.npz"
    with pytest.raises(Stop):
        cmrc.recover(program, lowered, [x], checkpoint=path, tell=stop, **options)
    assert path.exists()
    with pytest.raises(FileError, match="of another model, data or options"):
        cmrc.recover(program, lowered, [x], checkpoint=path, steps=12, seed=6)
    again = cmrc.recover(program, lowered, [x], checkpoint=path, **options)
    assert np.array_equal(whole.host.run([x])[0], again.host.run([x])[0])
    assert replace(again.recovery, seconds=0) == replace(whole.recovery, seconds=0)  # type: ignore[type-var]
    assert not path.exists()


def test_what_is_not_better_is_not_returned() -> None:
    """Training as fast as this throws the network off at once."""
    program, lowered, x = prepared("fx")
    recovered = cmrc.recover(program, lowered, [x], steps=20, rate=50.0)
    assert recovered.recovery is not None
    assert recovered.recovery.after <= recovered.recovery.before
    if not recovered.recovery.trained:
        assert recovered.check([x[:8]]).holds
        assert "nothing better" in str(recovered.recovery)


def test_batch_norm_keeps_its_statistics_and_the_original_its_weights() -> None:
    program, lowered, x = prepared("fx")
    before = program.host.run([x])[0]
    recovered = cmrc.recover(program, lowered, [x], steps=20)
    leaves, small = recovered.host.graph.leaves(), lowered.host.graph.leaves()
    for name in ("bn.running_mean", "bn.running_var"):
        assert np.array_equal(leaves[name].load(), small[name].load())
    assert not np.array_equal(leaves["conv1.weight"].load(), small["conv1.weight"].load())
    assert np.array_equal(program.host.run([x])[0], before)
    assert "bn.running_mean" not in trainable(small_graph := lowered.host.graph)
    assert set(folded(program.graph, small_graph)) < set(trainable(small_graph))
    assert set(compared(program.host, lowered.host)) <= set(program.graph.values())


class Tied(torch.nn.Module):
    """Words into classes of words by one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc, self.act = torch.nn.Embedding(9, 6), torch.nn.Linear(6, 12), torch.nn.GELU()
        self.back, self.head = torch.nn.Linear(12, 6), torch.nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(x + self.back(self.act(self.fc(x))))


def test_tied_weights_stay_tied_and_are_those_that_were_judged() -> None:
    torch.manual_seed(0)
    ids = np.random.default_rng(0).integers(0, 9, (64, 5))
    program = cmrc.trace(Tied().eval(), (torch.from_numpy(ids),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act", units=range(8), constant=0.0))
    recovered = cmrc.recover(program, lowered, [ids], held_out=[ids], steps=20)
    recovery, state = recovered.recovery, dict(recovered.module.named_parameters(remove_duplicate=False))
    assert recovery is not None
    assert recovery.after < recovery.before
    assert state["table.weight"] is state["head.weight"]
    want, got = (torch.from_numpy(each.host.run([ids])[0]).log_softmax(-1) for each in (program, recovered))
    assert float((want.exp() * (want - got)).sum(-1).mean()) == pytest.approx(recovery.after, rel=1e-4)


def test_labels_are_used_if_they_are_given() -> None:
    program, lowered, x = prepared("fx")
    labels = program.host.run([x])[0].argmax(1)
    with_labels = cmrc.recover(program, lowered, [(x, labels)], steps=6)
    without = cmrc.recover(program, lowered, [(x, labels)], steps=6, labels=0)
    assert with_labels.recovery is not None
    assert with_labels.recovery.labels
    assert without.recovery is not None
    assert not without.recovery.labels
    assert not np.array_equal(with_labels.host.run([x])[0], without.host.run([x])[0])


def test_minutes_are_those_of_the_clock() -> None:
    program, lowered, x = prepared("fx")
    ticks = iter(range(10_000))
    recovered = cmrc.recover(program, lowered, [x], minutes=1.0, clock=lambda: float(next(ticks)))
    assert recovered.recovery is not None
    assert 60 <= recovered.recovery.seconds < 75


def test_mistakes_are_named() -> None:
    program, lowered, x = prepared("fx")
    for options, problem in [
        ({"loss": "mse"}, "loss='mse' is not known"),
        ({"train": "some"}, "train='some' is not known"),
        ({"minutes": 0}, "there is no time to recover in"),
    ]:
        with pytest.raises(InputError, match=problem):
            cmrc.recover(program, lowered, [x], **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one sample cannot be split"):
        cmrc.recover(program, lowered, [x[:1]])


def test_the_command_writes_a_file_that_says_what_it_is(tmp_path: Path) -> None:
    model, train, plan, small = (
        EXAMPLE / "digits.onnx",
        EXAMPLE / "digits_train.npz",
        tmp_path / "p.json",
        tmp_path / "s.onnx",
    )
    program = cmrc.trace(model)
    cmrc.plan(program, data=str(train), preset="joint", keep=0.4).save(plan)
    answer = cli("recover", str(model), str(plan), "--data", str(train), "-o", str(small), "--steps", "40", "--json")
    assert answer.exit_code == 0, answer.output
    recovery = json.loads(answer.stdout)["recovery"]
    assert recovery["after"] < recovery["before"]
    checked = cli("check", str(model), str(small), str(plan))
    assert checked.exit_code == 1
    assert "compared are the plan and a recovered model" in " ".join(checked.output.split())
    verified = cli("provenance", str(small), "--model", str(model), "--plan", str(plan))
    assert verified.exit_code == 0, verified.output
    assert "and trained afterwards" in verified.output
    judged = cli(
        "verify", str(model), str(small), str(plan), "--data", str(EXAMPLE / "digits_test.npz"), "--swaps", "0"
    )
    assert judged.exit_code == 0, judged.output


def test_the_weights_that_are_returned_are_the_best_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is so large that it throws the network off."""
    program, lowered, x = prepared("fx")
    monkeypatch.setattr(RecoveryRun, "rate", lambda self, share: 0.03 if share < 0.8 else 3.0)
    rounds: list[Round] = []
    rows = normal(64, 5)
    recovered = cmrc.recover(
        program, lowered, [x], held_out=[rows], steps=8, values=0.0, labels=0.0, tell=rounds.append
    )
    assert recovered.recovery is not None
    assert rounds[-1].held_out > 1.01 * rounds[-1].best
    assert apart(program, recovered, rows) == pytest.approx(rounds[-1].best, rel=1e-3)


def test_weights_that_did_not_move_are_not_called_recovered() -> None:
    program, lowered, x = prepared("fx")
    recovered = cmrc.recover(program, lowered, [x], steps=2, rate=0.0, refit=False)
    assert recovered.recovery is not None
    assert recovered.recovery.after == recovered.recovery.before
    assert recovered.recovery.trained == ()


def test_a_run_that_goes_on_takes_the_batches_that_it_has_not_seen() -> None:
    pool = Pool([{"x": np.arange(20)}], 4)

    def batches(step: int) -> list[list[int]]:
        run: Any = SimpleNamespace(train=pool, options=SimpleNamespace(seed=3), step=step)
        return [rows.arrays["x"].tolist() for rows in itertools.islice(RecoveryRun._rows(run), 12 - step)]

    whole = batches(0)
    assert whole[:5] != whole[5:10]  # every epoch has an order of its own
    assert sorted(itertools.chain(*whole[5:10])) == list(range(20))
    assert all(batches(step) == whole[step:] for step in (3, 5, 7))
