"""`lowered.module` in torch's own tools: a training loop in two processes, torch.compile, torch.export."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from processes import torchrun
from torch import nn

import cmrc

DISTRIBUTED = Path(__file__).parent / "distributed.py"


def small() -> cmrc.Lowered:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 4)).eval()
    program = cmrc.trace(model, (torch.randn(6, 8),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    return cmrc.lower(program, cmrc.Plan(program).do("1", units=range(8), constant=0.2))


def test_two_processes_train_the_same_module(tmp_path: Path) -> None:
    """Distributed over gloo: both end with the same weights, those of one process on the whole batch."""
    command = [*torchrun(), str(DISTRIBUTED), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = torch.load(tmp_path / "alone.pt", weights_only=True)
    assert first.keys() == second.keys() == alone.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        torch.testing.assert_close(tensor, alone[name], rtol=1e-5, atol=1e-6)
    assert first["0.weight"].shape == (8, 8)


def test_compile_gives_the_same_numbers() -> None:
    module, x = small().module, torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend="aot_eager")(x), module(x), rtol=1e-5, atol=1e-6)


def test_export_again_with_a_dynamic_batch() -> None:
    module, x = small().module, torch.randn(5, 8)
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    other = torch.randn(9, 8)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(other), module(other), rtol=1e-5, atol=1e-6)
    again = cmrc.trace(exported)
    assert [site.units for site in again.sites() if site.op == "relu"] == [8]


def test_a_training_step_in_train_mode_moves_batch_norm() -> None:
    module = small().module
    module.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    loss = nn.functional.cross_entropy(module(torch.randn(32, 8)), torch.randint(0, 4, (32,)))
    loss.backward()
    optimiser.step()
    after = module.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in ("0.weight", "3.weight", "2.running_mean"))


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_tunes_a_reduced_model_and_it_loads_again(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=32, attn_implementation="eager", num_labels=2)  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=ids).logits
            return logits

    ids = torch.randint(0, 16, (64, 8))
    wrapped = Logits().eval()
    program = cmrc.trace(wrapped, (ids[:4],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    sites = [site.name for site in program.sites() if site.units == 32 and "act" in site.name]
    plan = cmrc.plan(program, data=[ids], sites=sites, preset="joint", keep=0.5)
    cmrc.lower(program, plan).load_into(wrapped)
    rows = [{"input_ids": row, "labels": int(row[0] < 8)} for row in ids]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=20, per_device_train_batch_size=16, learning_rate=5e-3, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < sum(losses[:5])
    trainer.save_model(str(tmp_path / "tuned"))
    again = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / "tuned", attn_implementation="eager"
    ).eval()
    assert again.config.intermediate_size == 16
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)
