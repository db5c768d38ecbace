"""How outputs are read: classes, one logit, values; and what has no meaning."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from known import BATCH
from torch import nn
from verification.small_heads import INPUT, outputs_of

import cmrc
from cmrc.errors import CmrcError, VerifyError
from cmrc.verification.draws import bernoulli
from cmrc.verification.evidence import Readout, compare


class Tokens(nn.Module):
    """A word for every token; what is padded is not read by others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.act, self.head = nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.embed(tokens)))


def test_sequences_count_the_tokens_that_count() -> None:
    torch.manual_seed(0)
    program = cmrc.trace(Tokens(), (torch.zeros(2, 5, dtype=torch.int64),), dynamic_shapes=({0: BATCH},))
    rng = np.random.default_rng(0)
    tokens, counted = rng.integers(0, 9, size=(40, 5)), np.arange(5) < rng.integers(1, 6, size=(40, 1))
    plan = cmrc.Plan(program).do("act", units=[0, 1], constant=0.3)
    batches = [{"tokens": tokens, "labels": tokens % 4, "real": counted}]
    verifier = cmrc.Verifier(program, plan, batches, counted="real")
    draw = verifier.draw(np.random.default_rng(1), 200)
    shown = verifier.swap(draw)
    assert shown.agree.shape == (200, 5)
    expected = [shown.agree[i, counted[b]].mean() for i, b in enumerate(draw.base)]
    assert np.allclose(shown.mean(shown.agree), expected)
    # Tokens that are padding in base or source stay the base's: what they answer is what it answers without a swap.
    alone = cmrc.interpret(program).run((tokens,))[0].argmax(2)
    padded = ~(counted[draw.base] & counted[draw.source])
    assert np.array_equal(shown.classes[padded], alone[draw.base][padded])
    assert not np.array_equal(shown.classes, alone[draw.base])
    result = cmrc.verify(program, plan, batches, counted="real", swaps=200)
    assert result.plain.accuracy is not None
    with pytest.raises(VerifyError, match="the padding is of shape"):
        cmrc.verify(program, plan, batches, counted=counted[:, :4], swaps=10)
    with pytest.raises(VerifyError, match="an input has no token that counts"):
        cmrc.verify(program, plan, batches, counted=np.zeros((40, 5)), swaps=10)


def test_a_single_logit_is_read_by_its_sign() -> None:
    program = outputs_of(1)
    plan = cmrc.Plan(program).do("act", units=[0, 1], constant=0.2)
    verifier = cmrc.Verifier(program, plan, [INPUT], reads="binary")
    draw = verifier.draw(np.random.default_rng(0), 300)
    shown = verifier.swap(draw)
    z, other = (answers[:, 0] for answers in verifier.outputs(draw))
    assert np.array_equal(shown.agree[:, 0], (z > 0) == (other > 0))
    assert np.allclose(shown.margin[:, 0], np.abs(z))
    p, q = (1 / (1 + np.exp(-logit.astype(np.float64))) for logit in (z, other))
    assert np.allclose(shown.kl[:, 0], p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)), atol=1e-9)
    assert np.allclose(shown.spread, shown.largest)
    assert 0 < shown.agree.mean() <= 1


def test_a_regression_agrees_within_a_tolerance() -> None:
    program = outputs_of(2)
    plan = cmrc.Plan(program).do("act", units=[0, 1], constant=0.2)
    result = cmrc.verify(program, plan, [(INPUT, INPUT[:, 0])], tolerance=0.1, swaps=300)
    assert result.iia.value == np.mean(result.evidence.largest <= 0.1)
    assert result.is_regression
    assert result.plain.accuracy is None
    document = json.loads(json.dumps(result.to_json()))
    assert (document["kl"], document["margin"]) == (None, None)
    assert "KL" not in str(result)


REFUSED = {
    "no-classes": (1, {}, "an output of shape [1, 1] has no classes to compare"),
    "many-logits": (3, {"reads": "binary"}, "an output of shape [1, 3] has more than one logit"),
    "no-tolerance": (3, {"reads": "values"}, "agreement of values needs a tolerance"),
    "odd-reading": (3, {"reads": "ranks"}, "outputs cannot be read as 'ranks'"),
    "odd-axis": (3, {"class_axis": 0}, "axis 0 of an output of shape [1, 3] holds no classes"),
    "odd-output": (3, {"output": "logits"}, "the model has no output 'logits'"),
    "no-swaps": (3, {"swaps": -1}, "-1 swaps"),
    "odd-rate": (3, {"p": 1.5}, "swaps at rate 1.5"),
    "odd-scope": (3, {"about": "all"}, "a statement cannot be about 'all'"),
    "stress-fixed": (3, {"about": "fixed", "stress": 2}, "stress is for statements about the population"),
    "odd-stress": (3, {"stress": 0.5}, "stress is 0.5"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_has_no_meaning_is_refused(case: str) -> None:
    width, options, reason = REFUSED[case]
    program = outputs_of(width)
    plan = cmrc.Plan(program).do("act", units=[0], constant=0.2)
    with pytest.raises(VerifyError) as caught:
        cmrc.verify(program, plan, [INPUT], **options)
    assert caught.value.reason == reason
    assert caught.value.fix


def test_one_of_several_outputs_must_be_named() -> None:
    program = outputs_of(3, two=True)
    plan = cmrc.Plan(program).do("act", units=[0], constant=0.2)
    with pytest.raises(VerifyError, match="the model has 2 outputs"):
        cmrc.verify(program, plan, [INPUT])
    assert cmrc.verify(program, plan, [INPUT], output=0, swaps=50, controls=False).iia.value > 0
    named = cmrc.verify(
        program, plan, [INPUT], output=program.graph.outputs[1], reads="binary", swaps=50, controls=False
    )
    assert named.evidence.agree.shape == (50, 1)


def test_sites_that_cannot_be_verified_are_refused() -> None:
    program = outputs_of(3)
    everything = cmrc.Plan(program).do("act", units="all", constant=0.2)
    with pytest.raises(VerifyError, match="the plan retains no unit here on which to intervene"):
        cmrc.verify(program, everything, [INPUT])
    with pytest.raises(VerifyError, match="the plan replaces nothing"):
        cmrc.verify(program, cmrc.Plan(program), [INPUT])
    half = cmrc.Plan(program).do("act", units=range(4), constant=0.2)
    lowered = cmrc.lower(program, half)
    with pytest.raises(VerifyError) as caught:
        cmrc.verify(program, lowered, [INPUT], site="first")
    assert caught.value.reason == "the reduced model has 4 units here, the plan retains 8 of 8"
    with pytest.raises(VerifyError, match="the plan by which the model was lowered is not known"):
        cmrc.verify(program, cmrc.Program(lowered.host), [INPUT])
    with pytest.raises(VerifyError, match="the reduced model is the original itself"):
        cmrc.verify(program, program, [INPUT], plan=half)
    with pytest.raises(CmrcError, match="no site is called"):
        cmrc.verify(program, half, [INPUT], site="acts")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (np.zeros((50, 2)), "the labels are float64 [50, 2], the model answers [50, 1]"),
        (np.array(["a"] * 50), "the labels are str32 [50], the model answers [50, 1]"),
    ],
)
def test_labels_that_do_not_fit_are_refused_before_the_work(
    labels: np.ndarray, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = outputs_of(3)
    plan = cmrc.Plan(program).do("act", units=range(4), constant=0.2)
    monkeypatch.setattr(cmrc.Verifier, "swap", lambda *_: pytest.fail("it began to swap"))
    with pytest.raises(VerifyError) as caught:
        cmrc.verify(program, plan, [(INPUT, labels)])
    assert caught.value.reason == reason


def test_numbers_that_are_none_are_refused() -> None:
    z = np.array([[[0.0, np.nan]]])
    with pytest.raises(VerifyError, match="there are NaN or infinite outputs"):
        compare(Readout("classes", 2), z, z, None, np.zeros(1))
    with pytest.raises(VerifyError, match="the original gives"):
        compare(Readout("classes", 2), z, z[..., :1], None, np.zeros(1))


@pytest.mark.parametrize("p", [0.0, 0.25, 0.3, 0.5, 0.9, 1.0])
def test_units_are_drawn_independently_at_the_rate_asked_for(p: float) -> None:
    mask = bernoulli(np.random.default_rng(0), p, (4000, 50)).astype(np.float64)
    deviation = np.sqrt(p * (1 - p))
    assert abs(mask.mean() - p) <= 5 * deviation / np.sqrt(mask.size) + 2**-17
    centred = mask - p
    together = centred.T @ centred / len(mask)  # off the diagonal 0 for independent units
    assert np.abs(together - np.diag(np.diag(together))).max() <= 6 * deviation**2 / np.sqrt(len(mask))
    assert abs((centred[1:] * centred[:-1]).mean()) <= 5 * deviation**2 / np.sqrt(mask.size)
