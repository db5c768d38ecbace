"""What a model takes and returns on the torch host, and what it computes besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from differential.models import net, randomise
from hosts.fx.small_network import BATCH, clamped, close, images, lower
from tolerances import ACROSS_F32, EXACT_F32, distance
from torch import nn

import cmrc
from cmrc.errors import HostError


def with_keywords(m: Any, x: torch.Tensor, *, shift: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
    hidden = m.act(m.fc1(x) + shift)
    return {"logits": m.fc2(hidden) * scale, "parts": (hidden.sum(), [m.fc3(hidden)])}


def with_a_dict(m: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return m.fc2(m.act(m.fc1(batch["x"]) + batch["shift"])), m.fc3(batch["x"])


def members(ins: int) -> dict[str, nn.Module]:
    return {"fc1": nn.Linear(6, 8), "act": nn.ReLU(), "fc2": nn.Linear(8, 4), "fc3": nn.Linear(ins, 2)}


def test_keywords_and_nested_outputs() -> None:
    model = randomise(net(with_keywords, **members(8))).eval()
    x, shift = torch.randn(3, 6), torch.randn(3, 1)
    # `hidden.sum()` reads all units: the clamp stays there.
    program = cmrc.trace(model, (x,), kwargs={"shift": shift})
    lowered = cmrc.lower(program, cmrc.Plan(program).do("fc1", units=[1], constant=0.3), residue="keep")
    output, wanted = lowered.module(x, shift=shift), clamped(model, "fc1", [1], [0.3])(x, shift=shift)
    assert set(output) == {"logits", "parts"}
    assert close(output["logits"], wanted["logits"])
    assert close(output["parts"][0], wanted["parts"][0])
    assert close(output["parts"][1][0], wanted["parts"][1][0])


def test_a_dict_as_input() -> None:
    model = randomise(net(with_a_dict, **members(6))).eval()
    batch = {"x": torch.randn(3, 6), "shift": torch.randn(3, 1)}
    lowered = lower(model, (batch,), "act", [1, 4], [0.3, 0.9])
    wanted = clamped(model, "act", [1, 4], [0.3, 0.9])(batch)
    for outputs in (lowered.module(batch), [torch.from_numpy(a) for a in lowered.host.run((batch,))]):
        assert all(close(a, b) for a, b in zip(outputs, wanted, strict=True))
    assert lowered.check((batch,)).holds


def test_an_output_that_is_no_tensor() -> None:
    model = randomise(net(lambda m, x: (m.fc2(m.act(m.fc1(x))), None, 3), **members(6))).eval()
    x = torch.randn(3, 6)
    output = lower(model, (x,), "act", [1], 0.3).module(x)
    assert close(output[0], clamped(model, "act", [1], [0.3])(x)[0])
    assert output[1:] == (None, 3)


def test_a_parameter_that_is_an_output_stays_as_it_is() -> None:
    model = randomise(net(lambda m, x: (m.fc2(m.act(m.fc1(x))), m.fc2.weight, m.fc1.bias * 2), **members(6))).eval()
    x = torch.randn(3, 6)
    output = lower(model, (x,), "act", [1], 0.3).module(x)
    wanted = clamped(model, "act", [1], [0.3])(x)
    assert all(close(a, b) for a, b in zip(output, wanted, strict=True))


CONSTANT = torch.linspace(-1, 1, 8)


def test_a_constant_tensor_in_the_forward() -> None:
    model = randomise(
        net(lambda m, x: m.fc2(m.act(m.fc1(x)) * torch.tensor([0.5] * 4 + [2.0] * 4) + CONSTANT), **members(6))
    )
    x = torch.randn(3, 6)
    lowered = lower(model, (x,), "act", [1, 4], [0.3, 0.9])
    assert close(lowered.module(x), clamped(model, "act", [1, 4], [0.3, 0.9])(x))


def test_a_constant_tensor_in_the_forward_of_a_part() -> None:
    part = net(lambda m, x: x * torch.tensor([0.5] * 4 + [2.0] * 4))
    model = randomise(net(lambda m, x: m.fc2(m.part(m.act(m.fc1(x)))), part=part, **members(6)))
    x = torch.randn(3, 6)
    lowered = lower(model, (x,), "act", [1, 4], [0.3, 0.9])
    assert close(lowered.module(x), clamped(model, "act", [1, 4], [0.3, 0.9])(x))


def test_buffers_whose_function_is_stored_instead_do_not_stay() -> None:
    part = net(lambda m, x: x * (m.scale * 2.0).sqrt())
    part.register_buffer("scale", torch.linspace(1, 2, 8))
    model = randomise(net(lambda m, x: m.fc2(m.part(m.act(m.fc1(x)))), part=part, **members(6)))
    x = torch.randn(3, 6)
    lowered = lower(model, (x,), "act", [1, 4], [0.3, 0.9])
    assert close(lowered.module(x), clamped(model, "act", [1, 4], [0.3, 0.9])(x))
    assert all(8 not in tensor.shape for tensor in lowered.module.state_dict().values())


def test_attention_that_is_reshaped_without_a_copy_exports(tmp_path: Path) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).reshape(-1, 5, 3, 4).transpose(1, 2) for f in (m.q, m.k, m.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return m.fc2(m.act(m.fc1(attended.transpose(1, 2).reshape(-1, 5, 12))))

    parts = {name: nn.Linear(12, 12) for name in "qkv"}
    model = randomise(net(forward, **parts, fc1=nn.Linear(12, 8), act=nn.ReLU(), fc2=nn.Linear(8, 4)))
    x = torch.randn(2, 5, 12)
    lowered = lower(model, (x,), "act", [1, 4], [0.3, 0.9], dynamic_shapes=({0: BATCH},))
    lowered.save(tmp_path / "small.onnx")
    again = torch.randn(3, 5, 12)
    output = cmrc.trace(tmp_path / "small.onnx").run((again.numpy(),))[0]
    assert distance(output, lowered.clamped.run((again,))[0]) <= ACROSS_F32


def test_weights_that_are_computed_from_parameters() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.fc2(m.act(m.fc1(x)) * (1 + m.gain) / m.gain.abs()) + m.gain.sum()

    model = randomise(net(forward, fc1=nn.Linear(6, 8), act=nn.ReLU(), fc2=nn.Linear(8, 4), gain=torch.empty(8)))
    nn.utils.parametrizations.weight_norm(model.fc1)
    nn.utils.parametrizations.weight_norm(model.fc2)
    x = torch.randn(3, 6)
    lowered = lower(model, (x,), "act", [1, 4], [0.3, 0.9])
    assert close(lowered.module(x), clamped(model, "act", [1, 4], [0.3, 0.9])(x))
    assert torch.equal(lowered.module.get_parameter("gain"), model.gain)  # the sum reads all of it
    lowered.module(x).sum().backward()
    assert all(p.grad is not None for p in lowered.module.parameters())


def test_a_plan_is_lowered_on_the_module_it_was_made_for(model: nn.Module) -> None:
    program = cmrc.trace(model, (images(),), dynamic_shapes=({0: BATCH},))
    plan = cmrc.Plan(program).do("act", units=[1], constant=0.5)
    assert cmrc.lower(model, plan).check((images(9),)).holds


def test_an_input_changed_in_place_is_refused() -> None:
    model = net(lambda m, x: m.fc2(x.view(-1, 6).relu_() + x), fc2=nn.Linear(6, 4))
    with pytest.raises(cmrc.CmrcError, match="changes in place a value whose memory others share"):
        cmrc.trace(model, (torch.randn(2, 6),))


def test_a_shared_value_changed_in_place_is_made_functional() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.fc1(x)
        return m.fc2(h.view(2, -1).relu_().view(-1, 6) + h)

    model = randomise(net(forward, fc1=nn.Linear(6, 6), fc2=nn.Linear(6, 4)))
    x = torch.randn(2, 6)
    program = cmrc.trace(model, (x,))
    assert close(torch.from_numpy(program.run((x,))[0]), model(x))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("fc1", units=[1, 4], constant=0.3))
    assert lowered.check((x,)).holds


def test_in_place_ops_that_nobody_else_sees() -> None:
    model = randomise(
        net(
            lambda m, x: m.fc2(m.fc1(x).view(2, -1).mul_(1.5).view(-1, 6).add_(0.2).relu_()),
            fc1=nn.Linear(6, 6),
            fc2=nn.Linear(6, 4),
        )
    )
    x = torch.randn(2, 6)
    lowered = lower(model, (x,), "relu_", [1, 4], [0.3, 0.9])
    assert lowered.check((x,)).holds
    assert distance(lowered.program.run((x,))[0], model(x).detach().numpy()) <= EXACT_F32


def test_the_arguments_have_the_names_of_the_models_own(lowered: cmrc.Lowered) -> None:
    assert torch.equal(lowered.module.eval()(input=images()), lowered.module(images()))


def test_numpy_inputs_and_taps(model: nn.Module, lowered: cmrc.Lowered) -> None:
    x = images().numpy()
    outputs = lowered.program.host.run((x,), taps=["relu_"])
    assert [o.shape for o in outputs] == [(4, 4), (4, 6, 4, 3)]
    assert np.array_equal(outputs[0], model(images()).detach().numpy())


def test_inputs_by_name() -> None:
    keyed = randomise(net(with_keywords, **members(8))).eval()
    x, shift = torch.randn(3, 6), torch.randn(3, 1)
    program = cmrc.trace(keyed, (x,), kwargs={"shift": shift})
    wanted = program.run((x, shift))
    assert all(np.array_equal(a, b) for a, b in zip(program.run({"shift": shift, "x": x}), wanted, strict=True))
    assert all(
        np.array_equal(a, b) for a, b in zip(program.run({"x": x, "shift": shift}, ["relu"]), wanted, strict=False)
    )
    with pytest.raises(HostError, match=r"the model takes the inputs x, shift \(given: x\)"):
        program.run({"x": x})
    with pytest.raises(HostError, match=r"the model takes the inputs x, shift \(given: 3 in order\)"):
        program.run((x, shift, x))


class TwoAnswers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.act(self.fc1(x))
        return {"logits": self.fc2(hidden), "hidden": hidden * 1.0}


def test_outputs_are_called_by_their_keys_or_as_asked(tmp_path: Path) -> None:
    program = cmrc.trace(TwoAnswers().eval(), (torch.randn(5, 6),))
    lowered = cmrc.lower(program, cmrc.Plan(program).do("fc1", units=[1], constant=0.3), residue="keep")
    lowered.save(tmp_path / "a.onnx")
    assert cmrc.trace(tmp_path / "a.onnx").graph.outputs == ("logits", "hidden")
    lowered.save(tmp_path / "b.onnx", output_names=["classes", "inner"])
    assert cmrc.trace(tmp_path / "b.onnx").graph.outputs == ("classes", "inner")
    with pytest.raises(cmrc.CmrcError, match="'classes' does not name 2 outputs"):
        lowered.save(tmp_path / "c.onnx", output_names=["classes"])
    with pytest.raises(cmrc.CmrcError, match="'x' is the name of another value of the model"):
        lowered.save(tmp_path / "c.onnx", output_names=["classes", "x"])
    assert not (tmp_path / "c.onnx").exists()
    plain = cmrc.trace(tmp_path / "a.onnx")
    same = cmrc.lower(plain, cmrc.Plan(plain))
    with pytest.raises(cmrc.CmrcError, match="keeps the names of its outputs"):
        same.save(tmp_path / "c.onnx", output_names=["classes", "inner"])
