"""Models of the zoo as onnxruntime's own tool quantises them: static, with QuantizeLinear and DequantizeLinear around every op.

The schemes go round the models: activations of uint8 or int8, symmetric or not, one scale per weight or one per channel.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import handwritten  # noqa: F401  adds the entries that are quantised here
import models
import numpy as np
import onnx
from files import CACHE
from models import ENTRIES, add, randomise

import cmrc

FAMILY = "static int8"
SCHEMES: dict[str, dict[str, Any]] = {
    "uint8 × int8": {"activation_type": "QUInt8", "weight_type": "QInt8"},
    "uint8 × uint8": {"activation_type": "QUInt8", "weight_type": "QUInt8"},
    "int8 × int8": {"activation_type": "QInt8", "weight_type": "QInt8"},
    "uint8 × int8 per channel": {"activation_type": "QUInt8", "weight_type": "QInt8", "per_channel": True},
    "int8 × int8 per channel, symmetric": {
        "activation_type": "QInt8", "weight_type": "QInt8", "per_channel": True, "extra_options": {"ActivationSymmetric": True},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Static:
    """A model, quantised; its activations are seen on three batches."""

    base: str
    scheme: str

    def __call__(self) -> Path:
        entry = ENTRIES[self.base]
        path = CACHE / "static-int8" / f"{self.base}.onnx"
        path.parent.mkdir(parents=True, exist_ok=True)
        given = [list(entry.inputs(batch).values()) for batch in ((2, 3, 4) if entry.dynamic else (2,))]
        with tempfile.TemporaryDirectory() as folder:
            whole, quantised = as_file(entry, Path(folder)), Path(folder) / "int8.onnx"
            names = [value.name for value in onnx.load(whole, load_external_data=False).graph.input]
            feeds = [dict(zip(names, (x.numpy() for x in xs), strict=True)) for xs in given]
            quantise(whole, quantised, feeds, SCHEMES[self.scheme])
            quantised.replace(path)
        return path


def as_file(entry: models.Entry, folder: Path) -> Path:
    """The model as an ONNX file that the quantiser takes: shapes inferred, norms in their convolutions."""
    from onnxruntime.quantization import quant_pre_process

    built = entry.build()
    whole, ready = folder / "whole.onnx", folder / "ready.onnx"
    if isinstance(built, Path):
        whole = built
    else:
        inputs = tuple(entry.inputs(2).values())
        shapes = tuple(dict.fromkeys(entry.dynamic, models.DYNAMIC) for _ in inputs)
        program = cmrc.trace(randomise(built), inputs, dynamic_shapes=shapes)
        cmrc.trace(program.host.to_onnx()).save(whole)  # type: ignore[attr-defined]
    quant_pre_process(whole, ready, skip_symbolic_shape=True)
    return ready


def quantise(model: Path, to: Path, batches: Iterable[Mapping[str, np.ndarray]], scheme: Mapping[str, Any]) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Batches(CalibrationDataReader):
        def __init__(self) -> None:
            self.left: Iterator[Mapping[str, np.ndarray]] = iter(batches)

        def get_next(self) -> Any:
            return next(self.left, None)

    kinds = {name: getattr(QuantType, kind) for name, kind in scheme.items() if name.endswith("_type")}
    quantize_static(model, to, Batches(), quant_format=QuantFormat.QDQ, **{**scheme, **kinds})


def static(base: str, scheme: str, note: str = "") -> None:
    entry = ENTRIES[base]
    add(
        f"{base}_int8", FAMILY, Static(base, scheme), entry.inputs, dynamic=entry.dynamic, skip=entry.skip, alike=entry.alike,
        note=f"{scheme}{'; ' if note else ''}{note}",
    )  # fmt: skip


static("resnet20", "int8 × int8 per channel, symmetric")
static("mobilenet_v2", "uint8 × int8")
static("convnext", "int8 × int8")
static("unet", "uint8 × int8 per channel")
static("deit", "uint8 × uint8")
static("bert", "uint8 × int8 per channel")
static("gpt2", "int8 × int8")
static("llama", "uint8 × int8")
static("whisper", "uint8 × int8 per channel")
static("ppocr_cls", "uint8 × int8")
