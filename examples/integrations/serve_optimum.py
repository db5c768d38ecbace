"""A reduced text classifier behind optimum's ORTModel, and where it really runs: python serve_optimum.py (needs optimum-onnx).

CUDA is asked for. Without a GPU onnxruntime falls back to the CPU; what is printed is the provider of the session, not the wish.
"""

from __future__ import annotations

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


ids, mask = torch.randint(0, 64, (8, 12)), torch.ones(8, 12, dtype=torch.long)
batch = torch.export.Dim("batch")
program = cmrc.trace(Logits().eval(), (ids, mask), dynamic_shapes=({0: batch}, {0: batch}))
sites = [site.name for site in program.sites() if site.units == 64 and site.folds and "act" in site.name]
plan = cmrc.plan(program, data=[(ids, mask)], sites=sites, preset="joint", keep=0.5)
lowered = cmrc.lower(program, plan)
config.save_pretrained("served")
lowered.save("served/model.onnx")

try:
    served = ORTModelForSequenceClassification.from_pretrained("served", provider="CUDAExecutionProvider")
except (ValueError, RuntimeError, ImportError) as error:
    print("CUDA:", str(error).strip().splitlines()[0])
    served = ORTModelForSequenceClassification.from_pretrained("served", provider="CPUExecutionProvider")
answer = served(input_ids=ids, attention_mask=mask).logits
with torch.no_grad():
    expected = lowered.module(ids, mask)
print("runs on", served.providers[0], "off by", float((answer - expected).abs().max()))
assert torch.allclose(answer, expected, atol=1e-4)
