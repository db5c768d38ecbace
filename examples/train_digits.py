"""Train the classifier that the example reduces, and export it to ONNX.

    python examples/train_digits.py        (needs the extras torch, cpu and dev)

Writes, beside this file:

    digits.onnx         the trained network: image[batch,1,8,8] -> logits[batch,10]
    digits_train.npz    the split it was trained on, for calibration: images, labels
    digits_test.npz     the held-out split, for measuring: images, labels

The data are scikit-learn's digits (1797 images of 8x8), split 80/20 by class. Seeds and thread count are
fixed, so the same library versions on the same machine give the same files.
"""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

HERE = Path(__file__).parent
SEED = 0
EPOCHS = 40
BATCH = 64
REQUIRED_ACCURACY = 0.97


class Digits(nn.Module):
    """Two convolutions with batch norm, then a three-layer MLP with one smooth and one piecewise-linear activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.act2 = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(512, 128)
        self.act3 = nn.GELU()
        self.fc2 = nn.Linear(128, 64)
        self.act4 = nn.ReLU()
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.act1(self.bn1(self.conv1(image)))
        hidden = self.act2(self.bn2(self.conv2(hidden)))
        hidden = self.flatten(self.pool(hidden))
        hidden = self.act3(self.fc1(hidden))
        hidden = self.act4(self.fc2(hidden))
        return self.head(hidden)


def load_splits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train images, test images, train labels, test labels: float32[n,1,8,8] in [0, 1] and int64[n]."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=SEED)


def train(images: np.ndarray, labels: np.ndarray) -> Digits:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = Digits()
    inputs, targets = torch.from_numpy(images), torch.from_numpy(labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(inputs)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def export(model: Digits, path: Path) -> None:
    # Two images, not one: the exporter specialises a batch of one to a constant.
    program = torch.onnx.export(
        model,
        (torch.zeros(2, 1, 8, 8),),
        dynamo=True,
        input_names=["image"],
        output_names=["logits"],
        dynamic_shapes={"image": {0: torch.export.Dim("batch")}},
        verbose=False,
    )
    assert program is not None
    for node in program.model.graph:
        # The exporter records source lines with the paths of the machine it ran on.
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    ir.save(program.model, path)


def accuracy(path: Path, images: np.ndarray, labels: np.ndarray) -> float:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"image": images})
    return float((logits.argmax(axis=1) == labels).mean())


def main() -> None:
    train_images, test_images, train_labels, test_labels = load_splits()
    model = train(train_images, train_labels)
    path = HERE / "digits.onnx"
    export(model, path)
    np.savez_compressed(HERE / "digits_train.npz", images=train_images, labels=train_labels)
    np.savez_compressed(HERE / "digits_test.npz", images=test_images, labels=test_labels)
    for split, images, labels in (("train", train_images, train_labels), ("test", test_images, test_labels)):
        print(f"{split:5} accuracy {accuracy(path, images, labels):.4f} on {len(labels)} images")
    print(f"{path.name}: {path.stat().st_size} bytes")
    reached = accuracy(path, test_images, test_labels)
    if reached < REQUIRED_ACCURACY:
        raise SystemExit(f"test accuracy {reached:.4f} is below {REQUIRED_ACCURACY}")


if __name__ == "__main__":
    main()
