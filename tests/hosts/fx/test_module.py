"""The torch result as a module: the user's own names and tensors, train and eval, pickling, export, training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from differential.models import chain, net, randomise, to_onnx
from hosts.fx.small_network import BATCH, clamped, close, images, lower
from tolerances import ACROSS_F32, distance
from torch import nn

import cmrc

# ---------------------------------------------------------------- names and tensors


def test_state_has_the_names_of_the_model(model: nn.Module, lowered: cmrc.Lowered) -> None:
    assert set(lowered.module.state_dict()) == set(model.state_dict())
    assert dict(lowered.module.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_parameters_have_the_smaller_shapes(model: nn.Module, lowered: cmrc.Lowered) -> None:
    changed = {
        n: tuple(t.shape) for n, t in lowered.module.state_dict().items() if t.shape != model.state_dict()[n].shape
    }
    of_units = ("conv1.bias", "bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var")
    assert changed == {"conv1.weight": (4, 3, 3, 3), "conv2.weight": (5, 4, 1, 1), **dict.fromkeys(of_units, (4,))}


def test_unchanged_tensors_are_the_models_own_if_asked_for(model: nn.Module, lowered: cmrc.Lowered) -> None:
    shared = lowered.torch_module(share=True)
    for name in ("bn2.weight", "bn2.bias", "head.weight", "head.bias"):
        assert shared.get_parameter(name) is model.get_parameter(name)
    assert shared.get_buffer("bn2.running_var") is model.get_buffer("bn2.running_var")
    assert shared.get_parameter("conv2.weight") is not lowered.module.get_parameter("conv2.weight")
    assert torch.equal(shared(images()), lowered.module(images()))


def test_the_model_is_not_changed(model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    lower(model, (images(),), "act", [1, 4], 0.7)
    assert model.training
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_bias_that_was_not_there_gets_its_modules_name() -> None:
    model = randomise(chain(fc1=nn.Linear(6, 8, bias=False), act=nn.ReLU(), fc2=nn.Linear(8, 4, bias=False)))
    module = lower(model, (torch.randn(3, 6),), "act", [1], 0.7).module
    assert set(dict(module.named_parameters())) == {"fc1.weight", "fc2.weight", "fc2.bias"}


# ---------------------------------------------------------------- train and eval


def test_train_and_eval_do_what_they_do_to_the_model(model: nn.Module, lowered: cmrc.Lowered) -> None:
    # Dropout before conv2 would draw for six channels in one and four in the other: only the one behind it is compared.
    model.drop1 = nn.Identity()
    module = lower(model, (images(),), "act", [1, 4], [0.7, 1.9], dynamic_shapes=({0: BATCH},)).module
    reference = clamped(model, "act", [1, 4], [0.7, 1.9])
    x = images(8)
    assert close(module.eval()(x), reference.eval()(x))
    quiet = module(x)
    assert torch.equal(module(x), quiet)

    module.train(), reference.train()
    torch.manual_seed(3)
    drawn = module(x)
    torch.manual_seed(3)
    assert close(drawn, reference(x))
    assert not close(drawn, quiet, 1e-2)
    kept = [0, 2, 3, 5]
    for name in ("running_mean", "running_var"):
        assert close(module.get_buffer(f"bn1.{name}"), reference.get_buffer(f"bn1.{name}")[kept])
        assert close(module.get_buffer(f"bn2.{name}"), reference.get_buffer(f"bn2.{name}"))

    assert close(module.eval()(x), reference.eval()(x))
    assert not close(module(x), quiet, 1e-2)  # the statistics moved


def test_train_reaches_every_dropout(lowered: cmrc.Lowered) -> None:
    x = images()
    module = lowered.module.eval()
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))
    assert module.training
    assert not module.eval().training


def test_what_trains_in_eval_mode_always_does(tmp_path: Path) -> None:
    """Dropout that the forward asks for, and batch norm that keeps no statistics."""
    model = randomise(
        net(
            lambda m, x: m.fc2(nn.functional.dropout(m.bn(m.act(m.fc1(x))), 0.5, training=True)),
            fc1=nn.Linear(6, 8), act=nn.ReLU(), bn=nn.BatchNorm1d(8, track_running_stats=False), fc2=nn.Linear(8, 4),
        )
    ).eval()  # fmt: skip
    x = torch.randn(16, 6)
    program = cmrc.trace(model, (x,))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("act", units=[1], constant=0.3), residue="keep")
    torch.save(lowered.module, tmp_path / "small.pt")
    for module in (lowered.module, torch.load(tmp_path / "small.pt", weights_only=False)):
        for mode in (True, False):
            module.train(mode)
            torch.manual_seed(3)
            output = module(x)
            torch.manual_seed(3)
            assert close(output, clamped(model, "act", [1], [0.3]).train(mode)(x))


# ---------------------------------------------------------------- storing and exporting


@pytest.mark.parametrize("how", ["torch.save", "deepcopy"])
def test_copies_run_and_train(lowered: cmrc.Lowered, how: str, tmp_path: Path) -> None:
    if how == "deepcopy":
        again = copy.deepcopy(lowered.module)
    else:
        torch.save(lowered.module, tmp_path / "small.pt")
        again = torch.load(tmp_path / "small.pt", weights_only=False)
    x = images(7)
    assert torch.equal(again.eval()(x), lowered.module.eval()(x))
    assert set(again.state_dict()) == set(lowered.module.state_dict())
    assert set(dict(again.named_parameters())) == set(dict(lowered.module.named_parameters()))
    again.train()
    assert not torch.equal(again(x), again(x))


def test_state_dict_round_trip(lowered: cmrc.Lowered, tmp_path: Path) -> None:
    torch.save(lowered.module.state_dict(), tmp_path / "small.pt")
    again = copy.deepcopy(lowered.module)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    again.load_state_dict(torch.load(tmp_path / "small.pt", weights_only=True))
    assert torch.equal(again.eval()(images()), lowered.module.eval()(images()))


def test_exports_again(lowered: cmrc.Lowered) -> None:
    again = torch.export.export(lowered.module.eval(), (images(),), dynamic_shapes=({0: BATCH},))
    assert close(again.module()(images(9)), lowered.module(images(9)))
    assert cmrc.trace(again).host.graph.inputs


def test_lowers_again(model: nn.Module, lowered: cmrc.Lowered) -> None:
    program = cmrc.trace(lowered.module.eval(), (images(),))
    names = [site.name for site in program.sites(folds=False) if site.op == "relu"]
    twice = cmrc.lower(program, cmrc.Plan(program).do(names[0], units=[0], constant=0.4))
    assert twice.check((images(),)).holds
    assert twice.module.get_parameter("conv1.weight").shape == (3, 3, 3, 3)


def test_exports_to_onnx(lowered: cmrc.Lowered, tmp_path: Path) -> None:
    exported = torch.export.export(lowered.module.eval(), (images(),), dynamic_shapes=({0: BATCH},))
    session = onnxruntime.InferenceSession(to_onnx(exported).SerializeToString(), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: images(9).numpy()})
    assert distance(output, lowered.module(images(9)).detach().numpy()) <= ACROSS_F32


def saved_like_clamped(lowered: cmrc.Lowered, x: torch.Tensor, path: Path) -> None:
    """The file that `save` writes computes what the clamped model does, at a size that the trace did not see."""
    lowered.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert distance(output, lowered.clamped.run((x,))[0]) < ACROSS_F32


def test_modules_whose_names_are_no_identifiers(tmp_path: Path) -> None:
    """A bias that a fold adds to `block-1.0` becomes an argument of the exported program."""
    model = chain(**{"block-1": chain(conv=nn.Conv2d(3, 6, 1), act=nn.ReLU(), out=nn.Conv2d(6, 4, 1, bias=False))})
    lowered = lower(
        randomise(model).eval(), (images(),), "block-1.act", [1, 4], [0.7, 1.9], dynamic_shapes=({0: BATCH},)
    )
    assert "block-1.out.bias" in lowered.module.state_dict()
    saved_like_clamped(lowered, images(3), tmp_path / "lowered.onnx")


def test_sizes_of_run_time_in_ops_that_torch_has_in_cpp(tmp_path: Path) -> None:
    model = net(
        lambda m, x: m.out(nn.functional.interpolate(m.act(m.conv(x)), size=x.shape[2:], mode="bilinear")),
        conv=nn.Conv2d(3, 6, 3, stride=2), act=nn.ReLU(), out=nn.Conv2d(6, 4, 1),
    )  # fmt: skip
    dynamic = {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    lowered = lower(randomise(model).eval(), (images(),), "act", [1, 4], [0.7, 1.9], dynamic_shapes=(dynamic,))
    saved_like_clamped(lowered, torch.randn(3, 3, 9, 11), tmp_path / "lowered.onnx")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_units_above_a_recurrent_net(kind: Any, tmp_path: Path) -> None:
    """The batch of the hidden state that the model makes is not the traced one."""
    model = net(
        lambda m, x: m.out(m.act(m.fc(m.body(x)[0][:, -1]))),
        body=kind(5, 8, batch_first=True), fc=nn.Linear(8, 6), act=nn.ReLU(), out=nn.Linear(6, 2),
    )  # fmt: skip
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    lowered = lower(randomise(model).eval(), (x,), "act", [1, 4], [0.7, 1.9], dynamic_shapes=({0: BATCH},))
    saved_like_clamped(lowered, torch.randn(3, 4, 5), tmp_path / "lowered.onnx")


def test_the_units_of_a_recurrent_net_stay() -> None:
    model = net(lambda m, x: m.out(m.act(m.body(x)[0])), body=nn.LSTM(5, 8), act=nn.ReLU(), out=nn.Linear(8, 2))
    program = cmrc.trace(randomise(model).eval(), (torch.randn(4, 2, 5),))
    with pytest.raises(cmrc.CmrcError) as error:
        cmrc.lower(program, cmrc.Plan(program).do("act", units=[1], constant=0.5))
    assert "its gates read every hidden unit at the next step" in str(error.value)


# ---------------------------------------------------------------- training


def test_a_step_of_training_lowers_the_loss(lowered: cmrc.Lowered) -> None:
    module = copy.deepcopy(lowered.module).train()
    x, target = images(16), torch.arange(16) % 4
    module.eval()
    before = nn.functional.cross_entropy(module(x), target)
    before.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    torch.optim.SGD(module.parameters(), lr=0.05).step()
    assert nn.functional.cross_entropy(module(x), target) < before


def test_gradients_equal_those_of_the_clamped_model(model: nn.Module, lowered: cmrc.Lowered) -> None:
    reference, small = clamped(model, "act", [1, 4], [0.7, 1.9]), copy.deepcopy(lowered.module).eval()
    for module in (reference, small):
        module(images()).square().sum().backward()
    kept = [0, 2, 3, 5]
    ours, wanted = dict(small.named_parameters()), dict(reference.named_parameters())
    for name, index in {
        "conv1.weight": kept,
        "bn1.weight": kept,
        "head.weight": slice(None),
        "bn2.bias": slice(None),
    }.items():
        assert close(ours[name].grad, wanted[name].grad[index])
    assert close(ours["conv2.weight"].grad, wanted["conv2.weight"].grad[:, kept])


# ---------------------------------------------------------------- tied weights


def language_model(head_reads: str) -> nn.Module:
    """An embedding whose weight is the head's as well."""
    model = net(
        {"stream": lambda m, i: m.head(m.down(m.act(m.up(m.emb(i))))), "embedding": lambda m, i: m.head(m.act(m.emb(i)))}[head_reads],
        emb=nn.Embedding(9, 6), up=nn.Linear(6, 8), act=nn.GELU(), down=nn.Linear(8, 6), head=nn.Linear(6, 9, bias=False),
    )  # fmt: skip
    model.head.weight = model.emb.weight
    return randomise(model).eval()


IDS = torch.tensor([[1, 4, 8], [0, 2, 5]])


def test_tied_weights_stay_tied() -> None:
    model = language_model("stream")
    lowered = lower(model, (IDS,), "act", [1, 4], [0.7, -0.9])
    assert lowered.report.untied == ()
    assert lowered.module.get_parameter("head.weight") is lowered.module.get_parameter("emb.weight")
    assert lowered.torch_module(share=True).get_parameter("head.weight") is model.emb.weight
    assert lowered.module.train().get_parameter("head.weight") is lowered.module.get_parameter("emb.weight")


def test_tied_weights_that_lose_the_same_units_stay_tied() -> None:
    model = language_model("embedding")
    lowered = lower(model, (IDS,), "act", [1, 4], 0.0)
    assert lowered.report.untied == ()
    shapes = {name: tuple(tensor.shape) for name, tensor in lowered.module.state_dict().items()}
    assert shapes["emb.weight"] == shapes["head.weight"] == (9, 4)
    assert lowered.module.get_parameter("head.weight") is lowered.module.get_parameter("emb.weight")
    assert lowered.check((IDS,)).holds


def test_one_weight_of_two_modules_is_written_into_both() -> None:
    """torch's exporter reads it by one of its names."""
    model = net(
        lambda m, x: m.a(m.act(m.fc(x))) + 2 * m.b(m.act(m.fc(x))),
        fc=nn.Linear(6, 8), act=nn.ReLU(), a=nn.Linear(8, 3), b=nn.Linear(8, 3),
    )  # fmt: skip
    model.b.weight = model.a.weight
    x = torch.randn(4, 6)
    program = cmrc.trace(randomise(model).eval(), (x,))
    plan = cmrc.Plan(program)
    for site in (site.name for site in program.sites() if site.op == "relu"):
        plan.do(site, units=[1, 4], constant=0.3)
    lowered = cmrc.lower(program, plan)
    expected = lowered.module(x)
    lowered.load_into(model)
    assert model.a.weight is model.b.weight
    assert model.a.weight.shape == (3, 6)
    torch.testing.assert_close(model(x), expected)


def test_tied_weights_that_a_fold_must_separate_are_reported() -> None:
    """The head takes over what unit 1 sent, the embedding does not."""
    model = language_model("embedding")
    program = cmrc.trace(model, (IDS,))
    plan = cmrc.Plan(program).do("act", units=[1], affine=cmrc.Affine(parents=[0], weight=[[0.5]], bias=[0.7]))
    lowered = cmrc.lower(program, plan, growth="allow")
    assert len(lowered.report.untied) == 1
    assert "weight" in lowered.report.untied[0]
    assert lowered.report.untied[0] in str(lowered.report)
    assert str(lowered.report).startswith("this costs more than the model: ")
    assert lowered.check((IDS,)).holds
    assert model.emb.weight.shape == (9, 6)


def test_calls_of_one_module_that_become_different_are_reported() -> None:
    model = randomise(net(lambda m, x: m.fc(m.act(m.fc(x))), fc=nn.Linear(6, 6), act=nn.ReLU()))
    program = cmrc.trace(model, (torch.randn(3, 6),))
    plan = cmrc.Plan(program).do("act", units=[1, 4], constant=[0.7, -0.9])
    lowered = cmrc.lower(program, plan, growth="allow")
    assert lowered.report.untied
    assert lowered.check((torch.randn(3, 6),)).holds
