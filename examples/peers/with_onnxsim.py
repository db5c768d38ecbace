"""onnxsim: python examples/peers/with_onnxsim.py (needs onnx, onnxruntime, onnxsim)."""

from __future__ import annotations

import onnx
import onnxruntime
import onnxsim
from job import judge, test

# the job
model = onnx.load("model.onnx")
pruned = onnxsim.apply_structured_pruning(model, 0.5)
onnx.save(pruned, "small.onnx")

# how good is it
answers = []
for path in ("model.onnx", "small.onnx"):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    answers.append(session.run(None, {session.get_inputs()[0].name: test["images"]})[0].argmax(1))
agreement = (answers[0] == answers[1]).mean()
accuracy = (answers[1] == test["labels"]).mean()
print(agreement, accuracy)

# end
judge("onnxsim")
