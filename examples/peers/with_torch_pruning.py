"""Torch-Pruning: python examples/peers/with_torch_pruning.py (needs torch, onnx, torch-pruning)."""

from __future__ import annotations

import onnxruntime
import torch
import torch_pruning as tp
from job import judge, model, test, x

held_out = torch.from_numpy(test["images"])

# the job
with torch.no_grad():
    answers = model(held_out).argmax(1)
importance = tp.importance.MagnitudeImportance(p=2)
pruner = tp.pruner.BasePruner(model, x[:1], importance, pruning_ratio=0.5, ignored_layers=[model.head])
pruner.step()
dynamic = ({0: torch.export.Dim("batch")},)
torch.onnx.export(model, (x[:2],), "small.onnx", dynamo=True, dynamic_shapes=dynamic, external_data=False)

# how good is it
session = onnxruntime.InferenceSession("small.onnx", providers=["CPUExecutionProvider"])
small = session.run(None, {session.get_inputs()[0].name: test["images"]})[0].argmax(1)
agreement = (small == answers.numpy()).mean()
accuracy = (small == test["labels"]).mean()
print(agreement, accuracy, sum(p.numel() for p in model.parameters()))

# end
judge("Torch-Pruning")
