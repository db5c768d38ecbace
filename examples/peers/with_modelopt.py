"""NVIDIA ModelOpt, FastNAS: python examples/peers/with_modelopt.py (needs torch, nvidia-modelopt)."""

from __future__ import annotations

import modelopt.torch.prune as mtp
import torch
from job import judge, model, test, train, x
from torch.utils.data import DataLoader, TensorDataset

held_out, labels = (torch.from_numpy(test[name]) for name in ("images", "labels"))

# the job
loader = DataLoader(TensorDataset(x, torch.from_numpy(train["labels"])), batch_size=256)


def score(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float((model(held_out).argmax(1) == labels).float().mean())


with torch.no_grad():
    answers = model(held_out).argmax(1)
space = mtp.fastnas.FastNASConfig()
space["nn.Conv2d"]["*"]["channel_divisor"] = 4
pruned, _ = mtp.prune(
    model=model,
    mode=[("fastnas", space)],
    constraints={"flops": "50%"},
    dummy_input=x[:1],
    config={
        "data_loader": loader,
        "collect_func": lambda batch: batch[0],
        "score_func": score,
        "checkpoint": "search.pth",
    },
)
dynamic = ({0: torch.export.Dim("batch")},)
torch.onnx.export(pruned, (x[:2],), "small.onnx", dynamo=True, dynamic_shapes=dynamic, external_data=False)

# how good is it
with torch.no_grad():
    small = pruned(held_out).argmax(1)
agreement = (small == answers).float().mean()
accuracy = (small == labels).float().mean()
print(agreement, accuracy)

# end
judge("ModelOpt")
