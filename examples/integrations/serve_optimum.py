"""A text classifier as optimum serves it, reduced: python serve_optimum.py (needs optimum-onnx and torch).

The folder holds a config.json and a model.onnx; cmrc replaces the latter by a smaller one. CUDA is asked for: without a GPU
onnxruntime falls back to the CPU, and what is printed is the provider of the session, not the wish.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from optimum.onnxruntime import ORTModelForSequenceClassification
from transformers import BertConfig, BertForSequenceClassification

import cmrc

torch.manual_seed(0)
config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    attn_implementation="eager",
)
model = BertForSequenceClassification(config).eval()


class Logits(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


Path("whole").mkdir(exist_ok=True)
Path("small").mkdir(exist_ok=True)
ids, mask = torch.randint(0, 64, (64, 12)), torch.ones(64, 12, dtype=torch.long)
batch = {0: torch.export.Dim("batch")}
torch.onnx.export(
    Logits().eval(),
    (ids, mask),
    "whole/model.onnx",
    input_names=["input_ids", "attention_mask"],
    output_names=["logits"],
    dynamic_shapes=(batch, batch),
    dynamo=True,
    external_data=False,
    verbose=False,
)
program = cmrc.trace("whole/model.onnx")
sites = [site.name for site in program.sites() if site.units == 64 and site.op == "gelu"]
data = [{"input_ids": ids.numpy(), "attention_mask": mask.numpy()}]
lowered = cmrc.lower(program, cmrc.plan(program, data=data, sites=sites, preset="joint", keep=0.5))
print(lowered.report)
assert lowered.check(data[0]).holds
lowered.save("small/model.onnx")
for folder in ("whole", "small"):
    config.save_pretrained(folder)


def served(folder: str) -> ORTModelForSequenceClassification:
    """The model, on a GPU if there is one."""
    try:
        return ORTModelForSequenceClassification.from_pretrained(folder, provider="CUDAExecutionProvider")
    except (ValueError, RuntimeError, ImportError) as error:
        print("CUDA:", str(error).strip().splitlines()[0])
        return ORTModelForSequenceClassification.from_pretrained(folder, provider="CPUExecutionProvider")


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    whole, small = served("whole"), served("small")
answers = [each(input_ids=ids, attention_mask=mask).logits.numpy() for each in (whole, small)]
print("runs on", small.providers[0], "and answers alike in", (answers[0].argmax(1) == answers[1].argmax(1)).mean())
expected = cmrc.trace("small/model.onnx").run(data[0])[0]
assert np.allclose(answers[1], expected, atol=1e-4)
assert small.providers[0] == "CPUExecutionProvider" or torch.cuda.is_available()
