"""Models that onnxruntime's own tool has quantised, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from cmrc.ir.graph import Array

SIGNED = {"activation_type": QuantType.QInt8, "weight_type": QuantType.QInt8}
UNSIGNED = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QUInt8}
MIXED = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
OPERATORS = {"quant_format": QuantFormat.QOperator}


class Batches(CalibrationDataReader):
    def __init__(self, batches: Sequence[Mapping[str, Array]]) -> None:
        self.left = iter(batches)

    def get_next(self) -> Any:
        return next(self.left, None)


def quantised(
    model: onnx.ModelProto, batches: Sequence[Mapping[str, Array]], folder: Path, **options: Any
) -> onnx.ModelProto:
    """A static int8 form of a model."""
    plain, small = folder / "float.onnx", folder / "int8.onnx"
    onnx.save(model, plain)
    given = {"quant_format": QuantFormat.QDQ, **MIXED, **options}
    quantize_static(plain, small, Batches(batches), **given)
    return onnx.load(small)
