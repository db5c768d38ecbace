"""g, h and H of every loss and site against autograd's own Hessian, sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Net, Tokens, activations, data, mlp, seeded, traced
from tolerances import EXACT_F64, distance
from torch import nn
from torch.nn import functional

import cmrc
from cmrc.errors import StatsError

WIDTHS = (5, 7, 6, 6, 4)


def suffix(model: Net, a: torch.Tensor, site: int) -> torch.Tensor:
    for i in range(site + 1, len(model.acts)):
        a = model.acts[i](model.layers[i](a))
    return model.layers[-1](a)


def brute(model: Net, values: np.ndarray, targets: np.ndarray, site: int, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """Gradient and Hessian of each sample's loss by its own values at the site."""
    gradients, hessians = [], []
    for value, target in zip(torch.from_numpy(values), torch.from_numpy(targets), strict=True):
        plain = suffix(model, value, site).detach()

        def at(a: torch.Tensor, target: torch.Tensor = target, plain: torch.Tensor = plain) -> torch.Tensor:
            z = suffix(model, a, site)
            if loss == "cross-entropy":
                return functional.cross_entropy(z[None], target[None])
            if loss == "kl":
                return (plain.softmax(0) * (plain.log_softmax(0) - z.log_softmax(0))).sum()
            return ((z - plain) ** 2).sum() if loss == "logit" else 0.5 * ((z - target) ** 2).sum()

        gradients.append(torch.autograd.functional.jacobian(at, value).numpy())
        hessians.append(torch.autograd.functional.hessian(at, value).numpy())
    return np.array(gradients), np.array(hessians)


class Scaled(nn.Module):
    """Bends behind functions that have parameters and do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.slope = nn.BatchNorm1d(1), nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.slope(self.norm(x.reshape(-1, 1, x.shape[-1])).reshape(x.shape)))


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.Tanh, Scaled])
@pytest.mark.parametrize("site", [0, 1, 2])
@pytest.mark.parametrize("loss", ["cross-entropy", "kl", "logit", "squared-error"])
def test_derivatives_are_those_of_autograd(act: type[nn.Module], site: int, loss: str) -> None:
    model = seeded(Net(WIDTHS, act), 3)
    program, (x, y) = traced(model, 5), data(9, 5)
    targets = y if loss != "squared-error" else data(9, 4, seed=5)[0]
    name = f"acts.{site}"
    need = ("curvature", "coupling", "rows")
    site_stats = cmrc.calibrate(program, [(x, targets)], sites=name, need=need, loss=loss)[name]
    a = activations(program, x, name)
    g, hessian = brute(model, a, targets, site, loss)
    h = np.diagonal(hessian, axis1=1, axis2=2)
    sums = {"g": g, "h": h, "ga": g * a, "ha": h * a, "haa": h * a**2, "abs_ga": np.abs(g * a)}
    for key, expected in sums.items():
        assert distance(site_stats.arrays[key], expected.sum(0)) < EXACT_F64, key
    # Between units there is Gauss-Newton alone: all there is where nothing bends above, or g is 0 at the logits.
    if site == 2 or act is nn.ReLU or loss in ("kl", "logit"):
        assert distance(site_stats.arrays["H"], hessian.sum(0)) < EXACT_F64
        assert distance(site_stats.arrays["HA"], np.einsum("nij,nj->ij", hessian, a)) < EXACT_F64
        assert distance(site_stats.arrays["AHA"], np.einsum("ni,nij,nj->ij", a, hessian, a)) < EXACT_F64
    order = np.lexsort(site_stats.arrays["rows"].T)
    assert distance(site_stats.arrays["row_h"][order], h[np.lexsort(a.T)]) < EXACT_F64


def test_gauss_newton_alone_is_wrong_where_functions_bend() -> None:
    model = seeded(Net(WIDTHS, nn.GELU), 3)
    program, (x, y) = traced(model, 5), data(9, 5)
    exact, plain = (
        cmrc.calibrate(program, [(x, y)], sites="acts.1", need="curvature", curvature=how)["acts.1"]
        for how in ("full", "gauss-newton")
    )
    assert (exact.how, plain.how) == ("gauss-newton and second derivatives", "gauss-newton")
    assert distance(plain.arrays["h"], exact.arrays["h"]) > 0.3
    assert (exact.arrays["h"] < 0).any()


@pytest.mark.parametrize("loss", ["cross-entropy", "logit"])
def test_drawn_curvature_has_the_right_mean(loss: str) -> None:
    program, (x, y) = traced(seeded(Net(WIDTHS), 3), 5), data(9, 5)
    options = {"sites": "acts.0", "need": ("curvature", "coupling"), "loss": loss}
    exact = cmrc.calibrate(program, [(x, y)], **options)["acts.0"]
    drawn = cmrc.calibrate(program, [(x, y)], curvature="monte-carlo", draws=4000, **options)["acts.0"]
    again = cmrc.calibrate(program, [(x, y)], curvature="monte-carlo", draws=4000, **options)["acts.0"]
    assert drawn.how == "monte-carlo, 4000 draws"
    for key in ("h", "H"):
        scale = np.abs(exact.arrays[key]).max()
        assert np.abs(drawn.arrays[key] - exact.arrays[key]).max() < 0.06 * scale
        assert np.array_equal(drawn.arrays[key], again.arrays[key])


def test_tokens_and_heads_are_differentiated_element_by_element() -> None:
    model = seeded(Tokens())
    program, (x, y) = traced(model, 3, 6), data(6, 3, 6)
    name = next(site.name for site in program.sites(folds=False) if site.op == "attention")
    site_stats = cmrc.calibrate(
        program, [(x, y)], sites=name, need="curvature", positions="each", curvature="gauss-newton"
    )[name]
    # The same by finite differences of the loss in the head's own output, through the clamp of a plan.
    heads = activations(program, x, name)

    def loss(change: np.ndarray) -> np.ndarray:
        value = torch.from_numpy(heads + change)
        mixed = value.transpose(1, 2).reshape(6, 3, 6)
        z = torch.from_numpy(x) + model.proj(mixed)
        z = z + model.fc2(model.act(model.fc1(model.norm(z))))
        return functional.cross_entropy(model.head(z[:, 0]), torch.from_numpy(y), reduction="none").detach().numpy()

    step = 1e-5
    for h, t, i in ((0, 0, 1), (1, 0, 2), (1, 2, 0)):
        change = np.zeros_like(heads)
        change[:, h, t, i] = step
        slope = (loss(change) - loss(-change)).sum() / (2 * step)
        got = site_stats.columns.by_unit(site_stats.arrays["g"]).reshape(2, 3, 3)[h, t, i]
        assert abs(slope - got) < 1e-7


def test_labels_must_fit_the_logits() -> None:
    program, (x, _) = traced(seeded(Net(WIDTHS), 3), 5), data(9, 5)
    with pytest.raises(StatsError, match=r"the labels have shape \[9, 2\], the logits \[9, 4\]"):
        cmrc.calibrate(program, [(x, np.zeros((9, 2), dtype=int))], sites="acts.0", need="curvature")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (np.array([0, 4, 1]), "there is a label 4, but the model has 4 classes"),
        (np.array([0, -1, 1]), "there is a label -1, but the model has 4 classes"),
        (np.array([0.0, 1.0, 2.0]), "the labels are of type float64, not whole numbers"),
    ],
)
@pytest.mark.parametrize("site", ["acts.0", "acts.1"])
def test_labels_that_name_no_class_are_refused(labels: np.ndarray, reason: str, site: str) -> None:
    x, _ = data(3, 5)
    with pytest.raises(StatsError) as caught:
        cmrc.calibrate(mlp(), [(x, labels)], sites=site, need="curvature")
    assert caught.value.reason == reason


def test_a_position_without_a_label_has_no_gradient_in_closed_form_either() -> None:
    x, y = data(20, 5)
    y = np.where(np.arange(20) % 3 == 0, -100, y)
    closed, torched = (
        cmrc.calibrate(mlp(), [(x, y)], sites="acts.1", need="curvature", curvature=how)["acts.1"]
        for how in ("auto", "gauss-newton")
    )
    assert (closed.how, torched.how) == ("closed form", "gauss-newton")
    for name in ("g", "h", "ga", "ha", "haa"):
        assert distance(closed.arrays[name], torched.arrays[name]) < EXACT_F64
