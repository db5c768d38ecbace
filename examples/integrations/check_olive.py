"""What an Olive run left in its output folder: a smaller model that answers like the original. python check_olive.py out"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

(small,) = Path(sys.argv[1]).rglob("*.onnx")
test = np.load("test.npz")
answers = []
for path in ("model.onnx", small):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    answers.append(session.run(None, {session.get_inputs()[0].name: test["images"]})[0].argmax(1))
agreement = (answers[0] == answers[1]).mean()
ops = {node.op_type for node in onnx.load(small).graph.node}
print(f"{small}: {small.stat().st_size:,} bytes of {Path('model.onnx').stat().st_size:,}, agreement {agreement:.4f}")
assert small.stat().st_size < Path("model.onnx").stat().st_size / 2
assert agreement > 0.95
assert any("Integer" in op or "Quantize" in op for op in ops), ops  # the next pass ran on what ours returned
