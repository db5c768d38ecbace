"""The job that every tool of docs/comparison.md gets: a digits classifier of which half of the inner units should go.

It is trained here in seconds, as a torch module and as model.onnx. `judge` is not counted: it tells whether a snippet did its job.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

FOLDER = Path(__file__).parents[2] / "examples"
train, test = (np.load(FOLDER / f"digits_{part}.npz") for part in ("train", "test"))
x, y = torch.from_numpy(train["images"]), torch.from_numpy(train["labels"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.fc1, self.fc2, self.head = nn.Linear(512, 128), nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.conv2(self.conv1(x).relu()).relu(), 2)
        logits: torch.Tensor = self.head(self.fc2(self.fc1(x.flatten(1)).relu()).relu())
        return logits


torch.manual_seed(0)
model = Net()
optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
for _ in range(8):
    for rows in torch.randperm(len(x)).split(64):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
model.eval()
batch = torch.export.Dim("batch")
torch.onnx.export(
    model, (x[:2],), "model.onnx", dynamo=True, dynamic_shapes=({0: batch},), external_data=False, verbose=False
)


def judge(name: str, path: str = "small.onnx") -> None:
    """That there is a smaller file, and how it answers."""
    before, after = (Path(file).stat().st_size for file in ("model.onnx", path))
    answers = []
    for file in ("model.onnx", path):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        answers.append(session.run(None, {session.get_inputs()[0].name: test["images"]})[0].argmax(1))
    agreement, right = (answers[0] == answers[1]).mean(), [(a == test["labels"]).mean() for a in answers]
    print(
        f"{name}: {after / before:.2f} of the file, agreement {agreement:.3f}, accuracy {right[0]:.3f} -> {right[1]:.3f}"
    )
    assert after < 0.7 * before
