"""Small networks trained on real data, for what can only be measured on trained ones.

python -m benchmarks.trained [mlp] [resnet] [vit] [deit] [resnet56-0] ...   train what is not in the cache; a stopped one goes on

A trained model lies in the cache beside the data, with every epoch's state in between.
"""

from __future__ import annotations

import copy
import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.data import Images, cache, cifar10, digits, mnist
from benchmarks.models import MLP, DeiT
from cmrc.files import write_whole


class ResidualBlock(nn.Module):
    """conv-bn-relu-conv-bn around a shortcut; the inner channels are read by the second convolution alone."""

    def __init__(self, inside: int, outside: int, stride: int, inner: int | None = None) -> None:
        super().__init__()
        inner = inner or outside
        self.conv1 = nn.Conv2d(inside, inner, 3, stride, 1, bias=False)
        self.bn1, self.act = nn.BatchNorm2d(inner), nn.ReLU()
        self.conv2 = nn.Conv2d(inner, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        changed = stride != 1 or inside != outside
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False) if changed else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for 32 px: three stages of some blocks, whose inner channels may be given one by one."""

    def __init__(
        self, widths: tuple[int, ...] = (16, 32, 64), blocks: int = 1, inner: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0])
        layers: list[nn.Module] = []
        before = widths[0]
        for i, width in enumerate(widths):
            for j in range(blocks):
                own = None if inner is None else inner[len(layers)]
                layers.append(ResidualBlock(before, width, 2 if i and not j else 1, own))
                before = width
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(before, 10)

    def represent(self, x: torch.Tensor) -> torch.Tensor:
        """Everything before the classifier."""
        x = functional.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.represent(x))


class Classifier(nn.Module):
    """conv-bn-relu at 32, 16 and 8 px, the largest of every 2 x 2, then 256 hidden units that the head reads.

    Without a norm before their ReLU, half of the hidden units die within an epoch.
    """

    def __init__(self, channels: tuple[int, ...] = (32, 64, 128), hidden: int = 256) -> None:
        super().__init__()
        widths = [3, *channels]
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(a, b, 3, 2 if i else 1, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten())
        self.hidden, self.norm = nn.Linear(channels[-1] * 16, hidden, bias=False), nn.BatchNorm1d(hidden)
        self.act = nn.ReLU()
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.norm(self.hidden(self.features(x)))))


@dataclass(frozen=True)
class Training:
    """How one model is made."""

    name: str
    make: Callable[[], nn.Module]
    load: Callable[[], Images]
    sites: tuple[str, ...]
    epochs: int
    rate: float
    decay: float
    batch: int = 128
    augment: bool = False
    small: int = 0  # the first epochs, which see the pictures at half their size
    cycle: bool = True  # the rate rises and falls; else it stays
    half: bool = False  # activations in bfloat16, which halves the time of a convolution
    seed: int = 0

    @cached_property
    def data(self) -> Images:
        return self.load()

    def model(self) -> nn.Module:
        """The trained model in eval mode; trained now if it is not in the cache."""
        path = cache() / f"{self.name}.pt"
        if not path.exists():
            self.train()
        model = self.make()
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()

    def train(self) -> None:
        path, part = cache() / f"{self.name}.pt", cache() / f"{self.name}.part.pt"
        torch.manual_seed(self.seed)
        model, images = self.make().to(memory_format=torch.channels_last), self.data
        x, y = torch.from_numpy(images.train), torch.from_numpy(images.train_labels)
        optimiser = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=self.decay)
        steps = self.epochs * (len(x) // self.batch)
        schedule: torch.optim.lr_scheduler.LRScheduler
        if self.cycle:
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, self.rate, total_steps=steps, pct_start=0.2)
        else:
            schedule = torch.optim.lr_scheduler.ConstantLR(optimiser, factor=1.0)
        start, before, clock = 0, 0.0, time.process_time()
        if part.exists():
            state = torch.load(part, weights_only=True)
            model.load_state_dict(state["model"])
            optimiser.load_state_dict(state["optimiser"])
            schedule.load_state_dict(state["schedule"])
            start, before = state["epoch"], state.get("seconds", 0.0)
        for epoch in range(start, self.epochs):
            model.train()
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(len(x), generator=generator)
            total = 0.0
            for step in range(len(x) // self.batch):
                rows = order[step * self.batch : (step + 1) * self.batch]
                batch = augmented(x[rows], generator) if self.augment else x[rows]
                if epoch < self.small:
                    batch = functional.avg_pool2d(batch, 2)
                with halved(self.half):
                    answers = model(batch)
                loss = functional.cross_entropy(answers.float(), y[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                total += loss.item()
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
            seconds = before + time.process_time() - clock
            save({**state, "schedule": schedule.state_dict(), "epoch": epoch + 1, "seconds": seconds}, part)
            text = f"{self.name} epoch {epoch + 1} of {self.epochs}: loss {total / (step + 1):.4f}"
            print(f"{text}, {seconds:.0f} s of processor time", flush=True)
        save(model.state_dict(), path)
        part.unlink(missing_ok=True)  # another process may have trained the same
        right = accuracy(logits(model.eval(), images.test), images.test_labels)
        print(f"{self.name}: test accuracy {right:.4f}", flush=True)


@contextmanager
def halved(enabled: bool) -> Iterator[None]:
    """Activations in bfloat16; and attention by plain products, since of short sequences torch's own choice takes half of a step for its gradient."""
    if not enabled:
        yield
        return
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        yield


def save(state: dict[str, Any], path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_whole(path, buffer.getvalue())


def tuned(
    model: nn.Module,
    images: Images,
    steps: int,
    *,
    rate: float = 1e-3,
    decay: float = 1e-2,
    batch: int = 128,
    half: bool = False,
    seed: int = 0,
) -> nn.Module:
    """A copy trained further: the same steps on the same pictures in the same order, whatever the model.

    A lowered module shares what did not change with the model that it comes from, which must not be trained with it.
    """
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.from_numpy(images.train), torch.from_numpy(images.train_labels)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    order = torch.randperm(len(x), generator=generator)
    model.train()
    for step in range(steps):
        rows = order[step * batch % len(x) :][:batch]
        with halved(half):
            answers = model(augmented(x[rows], generator))
        loss = functional.cross_entropy(answers.float(), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def augmented(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Half of the pictures mirrored, and all moved by up to four pixels, together."""
    mirror = torch.rand(len(x), generator=generator) < 0.5
    x = torch.where(mirror[:, None, None, None], x.flip(3), x)
    down, right = torch.randint(0, 9, (2,), generator=generator).tolist()
    return functional.pad(x, (4, 4, 4, 4))[:, :, down : down + 32, right : right + 32]


def drawn_anew(model: nn.Module, seed: int) -> nn.Module:
    """The model with its linear layers as this seed draws them."""
    torch.manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return model


def fit(
    model: nn.Module, x: np.ndarray, y: np.ndarray, epochs: int, *, rate: float = 1e-3, batch: int = 128
) -> nn.Module:
    """The model trained by plain Adam, in memory: for networks that train in seconds. Order is drawn from torch's own generator."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            optimiser.zero_grad()
            functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    return model.eval()


def logits(model: Callable[[torch.Tensor], torch.Tensor], x: np.ndarray, batch: int = 500) -> np.ndarray:
    with torch.no_grad():
        parts = [model(torch.from_numpy(x[i : i + batch])) for i in range(0, len(x), batch)]
    return torch.cat(parts).numpy()


def accuracy(answers: np.ndarray, labels: np.ndarray) -> float:
    return float((answers.argmax(1) == labels).mean())


TRAININGS = {
    "mlp": Training("mlp-mnist", MLP, mnist, ("acts.0", "acts.1"), epochs=3, rate=1e-3, decay=1e-4),
    "resnet": Training(
        "resnet-cifar10", ResNet, cifar10, tuple(f"blocks.{i}.act" for i in range(3)),
        epochs=10, rate=4e-3, decay=1e-2, augment=True,
    ),
    "vit": Training(
        "vit-cifar10", lambda: DeiT((256,) * 4, width=64, heads=2, size=32, patch=4, classes=10), cifar10,
        tuple(f"blocks.{i}.mlp.act" for i in range(4)), epochs=5, rate=2e-3, decay=5e-2, augment=True,
    ),
    # DeiT-Tiny's own depth, width and heads, for as many epochs as an hour of one shared core holds.
    "deit": Training(
        "deit-cifar10", lambda: DeiT(size=32, patch=8, classes=10), cifar10,
        tuple(f"blocks.{i}.mlp.act" for i in range(12)), epochs=8, rate=7e-4, decay=5e-2, batch=64, augment=True, half=True,
    ),
    **{
        f"resnet56-{seed}": Training(
            f"resnet56-cifar10-seven-{seed}", lambda: ResNet(blocks=9), cifar10, ("mean",),
            epochs=7, rate=3e-3, decay=1e-1, augment=True, small=6, half=True, seed=seed,
        )
        for seed in range(3)
    },
    # The control of the paper's figures: no training.
    "resnet20": Training(
        "resnet20-untrained", lambda: ResNet(blocks=3), cifar10, ("mean",), epochs=0, rate=1e-3, decay=0.0, cycle=False
    ),
    # The paper names neither optimiser nor epochs: plain Adam, for as long as it takes to its test accuracy of 0.981.
    **{
        f"mlp-{seed}": Training(
            f"mlp-mnist-adam-{seed}", MLP, mnist, ("acts.1",), epochs=10, rate=1e-3, decay=0.0, cycle=False, seed=seed
        )
        for seed in range(10)
    },
    # Likewise, briefly.
    **{
        f"convnet-{seed}": Training(
            f"convnet-cifar10-norm-{seed}", Classifier, cifar10, ("act",), epochs=2, rate=1e-3, decay=0.0, cycle=False, seed=seed
        )
        for seed in range(5)
    },
}  # fmt: skip


def large_digits() -> Images:
    """scikit-learn's digits in the shape of CIFAR-10's pictures."""
    small = digits()

    def grown(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, 1, 8, 8).repeat(3, 1).repeat(4, 2).repeat(4, 3)

    return Images(grown(small.train), small.train_labels, grown(small.test), small.test_labels)


# The same networks trained for a moment on digits, which need no network: for `--quick`.
STAND_INS = {
    "mlp": replace(TRAININGS["mlp"], name="mlp-digits", load=digits, make=lambda: MLP((64, 512, 512, 10)), epochs=2),
    "resnet": replace(TRAININGS["resnet"], name="resnet-digits", load=large_digits, epochs=1),
    "vit": replace(TRAININGS["vit"], name="vit-digits", load=large_digits, epochs=1),
}


def main() -> None:
    for name in sys.argv[1:] or TRAININGS:
        TRAININGS[name].model()


if __name__ == "__main__":
    main()
