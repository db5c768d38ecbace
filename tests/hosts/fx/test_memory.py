"""Nothing of the user's is overwritten, and what was trained is what is saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from differential.models import chain, randomise
from tolerances import ACROSS_F32, EXACT_F32, distance
from torch import nn

import cmrc
from cmrc.errors import HostError
from cmrc.hosts.autograd.arrays import from_numpy
from cmrc.hosts.fx import memory
from cmrc.hosts.fx.memory import TensorReader, copies_on_write, own, own_all, readable

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
TENSORS = ("fc1.weight", "fc2.bias", "fc3.weight", "bn.weight", "bn.running_mean")  # cut, folded, and three untouched


def network() -> nn.Module:
    return randomise(
        chain(fc1=nn.Linear(6, 8), act=nn.ReLU(), fc2=nn.Linear(8, 5), bn=nn.BatchNorm1d(5), fc3=nn.Linear(5, 4))
    ).eval()


@pytest.fixture
def model() -> nn.Module:
    return network()


@pytest.fixture
def lowered(model: nn.Module) -> cmrc.Lowered:
    program = cmrc.trace(model, (X,))
    return cmrc.lower(program, cmrc.Plan(program).do("act", units=[1, 4], constant=[0.7, 1.9]))


@pytest.fixture(params=["copy on write", "clone"])
def _either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without torch's copy on write, which is private to torch."""
    if request.param == "clone":
        monkeypatch.setattr(memory, "copies_on_write", lambda: False)


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def is_as_before(module: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def step(module: nn.Module) -> None:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.5)
    module(X).square().sum().backward()
    optimiser.step()


def load(module: nn.Module) -> None:
    module.load_state_dict({name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()})


def through_numpy(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.detach().numpy()[...] = 3


def through_data(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(3)


def forward_in_training_mode(module: nn.Module) -> None:
    module.train()
    module(X)


WRITES = [step, load, through_numpy, through_data, forward_in_training_mode]


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("write", WRITES)
def test_writes_to_the_result_leave_the_model_as_it_is(
    model: nn.Module, lowered: cmrc.Lowered, write: Callable[[nn.Module], None]
) -> None:
    before, small = snapshot(model), snapshot(lowered.module)
    write(lowered.module)
    assert is_as_before(model, before)
    assert not is_as_before(lowered.module, small)
    assert np.array_equal(lowered.program.run((X,))[0], model.eval()(X).detach().numpy())


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("asked", ["module first", "module later"])
def test_writes_to_the_model_leave_the_result_as_it_is(
    model: nn.Module, lowered: cmrc.Lowered, write: Callable[[nn.Module], None], asked: str
) -> None:
    reference = copy.deepcopy(model)
    expected = lowered.host.run((X,))[0]
    if asked == "module first":
        assert lowered.module is not None
    write(model)
    assert not is_as_before(model, snapshot(reference))
    assert np.array_equal(lowered.module.eval()(X).detach().numpy(), expected)
    assert np.array_equal(lowered.host.run((X,))[0], expected)
    assert distance(lowered.program.run((X,))[0], reference(X).detach().numpy()) <= EXACT_F32
    assert lowered.check((X,)).holds


@pytest.mark.parametrize("write", WRITES)
def test_two_results_of_one_program_are_apart(
    model: nn.Module, lowered: cmrc.Lowered, write: Callable[[nn.Module], None]
) -> None:
    other = cmrc.lower(lowered.program, lowered.plan)
    before, third = snapshot(other.module), lowered.torch_module()
    write(lowered.module)
    assert is_as_before(other.module, before)
    assert is_as_before(third, before)
    assert other.check((X,)).holds


def test_writes_to_the_result_leave_the_plan_as_it_is(lowered: cmrc.Lowered) -> None:
    before = [entry.constant.copy() for entry in lowered.plan.entries]
    through_numpy(lowered.module)
    assert all(np.array_equal(e.constant, b) for e, b in zip(lowered.plan.entries, before, strict=True))


def test_memory_that_is_shared_is_written_by_both(model: nn.Module, lowered: cmrc.Lowered) -> None:
    shared = lowered.torch_module(share=True)
    with torch.no_grad():
        shared.get_parameter("fc3.bias").fill_(3)
        shared.get_parameter("fc1.bias").fill_(3)
    assert torch.equal(model.fc3.bias, torch.full((4,), 3.0))  # type: ignore[union-attr]
    assert not torch.equal(model.fc1.bias[0], torch.tensor(3.0))  # type: ignore[index, union-attr]


# ---------------------------------------------------------------- after training


def trained(lowered: cmrc.Lowered) -> nn.Module:
    module = lowered.module.train()
    for _ in range(3):
        step(module)
    return module.eval()


def assign_state(lowered: cmrc.Lowered) -> nn.Module:
    """Tensors that replace those of the module, instead of writing to them."""
    module = lowered.module
    state = {
        name: torch.rand_like(tensor) for name, tensor in module.state_dict().items() if tensor.is_floating_point()
    }
    module.load_state_dict(state, strict=False, assign=True)
    return module.eval()


@pytest.mark.parametrize("change", [trained, assign_state])
def test_what_was_trained_is_what_is_saved(
    lowered: cmrc.Lowered, change: Callable[[cmrc.Lowered], nn.Module], tmp_path: Path
) -> None:
    plain = lowered.host.run((X,))[0]
    assert lowered.host.graph.nodes  # a graph that is read before reads the new weights as well
    expected = change(lowered)(X).detach().numpy()
    assert distance(expected, plain) > 1e-2
    lowered.save(tmp_path / "small.onnx")
    metadata = {entry.key: entry.value for entry in onnx.load(tmp_path / "small.onnx").metadata_props}
    assert metadata["cmrc.retrained"].split(", ")[0] in lowered.module.state_dict()
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    (saved,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    assert distance(saved, expected) <= ACROSS_F32
    assert np.array_equal(lowered.host.run((X,))[0], expected)
    weights = {name: leaf.load() for name, leaf in lowered.host.graph.leaves().items()}
    assert all(np.array_equal(array, lowered.module.state_dict()[name]) for name, array in weights.items())


@pytest.mark.parametrize("change", [trained, assign_state])
def test_what_was_trained_is_loaded_into_the_module(
    model: nn.Module, lowered: cmrc.Lowered, change: Callable[[cmrc.Lowered], nn.Module]
) -> None:
    module = change(lowered)
    expected = module(X)
    lowered.load_into(model)
    assert torch.equal(model(X), expected)
    before, ours = snapshot(module), snapshot(model)
    step(model)
    assert is_as_before(module, before)
    assert not is_as_before(model, ours)
    assert torch.equal(module(X), expected)


def test_loading_shares_no_memory(model: nn.Module, lowered: cmrc.Lowered) -> None:
    expected = lowered.module(X)
    lowered.load_into(model)
    through_numpy(model)
    assert torch.equal(lowered.module(X), expected)
    assert lowered.check((X,)).holds
    through_numpy(lowered.module)
    through_data(model)
    assert torch.equal(lowered.module.get_parameter("fc1.weight"), torch.full((6, 6), 3.0))


def test_the_check_says_that_weights_were_changed(lowered: cmrc.Lowered) -> None:
    assert lowered.check((X,)).retrained == ()
    trained(lowered)
    check = lowered.check((X,))
    assert not check.holds
    assert set(check.retrained) == {name for name in lowered.module.state_dict() if "num_batches" not in name}
    assert str(check).endswith(
        "\nthe weights of lowered.module were changed after lowering (fc1.weight and 9 more): it no longer computes what "
        "the plan says, and need not be equal"
    )


def test_verification_uses_the_weights_as_they_are(lowered: cmrc.Lowered) -> None:
    data = [X]
    before = cmrc.verify(lowered.program, lowered, data, swaps=64, seed=0)
    trained(lowered)
    after = cmrc.verify(lowered.program, lowered, data, swaps=64, seed=0)
    assert after.kl != before.kl


def test_a_module_of_another_type_is_refused(lowered: cmrc.Lowered, tmp_path: Path) -> None:
    lowered.module.double()
    with pytest.raises(HostError) as error:
        lowered.save(tmp_path / "small.onnx")
    assert str(error.value) == (
        "host: fc1.weight of lowered.module is float64[6, 6] now, and was lowered as float32[6, 6]\n"
        "  fix: keep the shapes and types of parameters, or export lowered.module with torch.onnx.export"
    )


def test_a_module_without_a_parameter_is_refused(lowered: cmrc.Lowered) -> None:
    del lowered.module.fc3
    with pytest.raises(HostError, match=r"^host: lowered.module has no 'fc3.weight' any more\n"):
        lowered.check((X,))


# ---------------------------------------------------------------- tensors and arrays


def test_this_torch_copies_on_write() -> None:
    assert copies_on_write()


ODD = {
    "bfloat16": torch.randn(3, 4).bfloat16(),
    "float16": torch.randn(3, 4).half(),
    "bool": torch.tensor([True, False]),
    "a number": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "turned": torch.randn(3, 4).t(),
    "a part": torch.randn(5, 4)[1:4, ::2],
    "expanded": torch.randn(1).expand(4),
    "numpy's": torch.from_numpy(np.arange(6.0)),
    "a parameter": nn.Parameter(torch.randn(3)),
}


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("tensor", ODD.values(), ids=ODD)
def test_arrays_read_what_the_tensor_holds(tensor: torch.Tensor) -> None:
    array = readable(tensor)
    assert array.shape == tuple(tensor.shape)
    assert not array.flags.writeable
    assert torch.equal(from_numpy(array), tensor)
    assert type(own(tensor)) is type(tensor)
    assert torch.equal(own(tensor), tensor)


def test_arrays_do_not_follow_the_tensor() -> None:
    tensor = torch.arange(4.0)
    array = readable(tensor)
    tensor.add_(1)
    assert array.tolist() == [0, 1, 2, 3]
    del tensor
    assert array.tolist() == [0, 1, 2, 3]


def test_nothing_is_copied_before_somebody_writes() -> None:
    tensor = torch.zeros(1000)
    address = torch._C._data_address(tensor)
    assert torch._C._data_address(own(tensor)) == address
    assert readable(tensor).__array_interface__["data"][0] == address


def test_one_tensor_under_two_names_stays_one() -> None:
    tensor = nn.Parameter(torch.ones(3), requires_grad=False)
    copies = own_all({"a": tensor, "b": tensor, "c": torch.ones(3)})
    assert copies["a"] is copies["b"] is not tensor
    assert copies["c"] is not copies["a"]
    assert not copies["a"].requires_grad


def test_a_reader_follows_the_tensor_and_reads_it_once() -> None:
    tensor = nn.Parameter(torch.arange(4.0))
    read = TensorReader(tensor)
    before = read()
    assert read() is before
    with torch.no_grad():
        tensor[0] = 7
    assert before.tolist() == [0, 1, 2, 3]
    assert read().tolist() == [7, 1, 2, 3]
    tensor.data = torch.ones(4)
    assert read().tolist() == [1, 1, 1, 1]


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("tensor", ODD.values(), ids=ODD)
def test_a_reader_sees_every_write(tensor: torch.Tensor) -> None:
    tensor = tensor.clone()
    read = TensorReader(tensor)
    read()
    with torch.no_grad():
        tensor.copy_(tensor.roll(1) if tensor.ndim else tensor + 1)
    assert torch.equal(from_numpy(read()), tensor)
