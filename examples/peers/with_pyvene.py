"""pyvene: interchange interventions, since it does not reduce: python examples/peers/with_pyvene.py (needs torch, pyvene)."""

from __future__ import annotations

from typing import Any

import pyvene
import torch
from job import model, test

base, source = (torch.from_numpy(test["images"][rows]) for rows in (slice(0, 64), slice(64, 128)))


# the job
class Config:
    hidden_size = 128

    def to_dict(self) -> dict[str, Any]:
        return {}


model.config = Config()
units = torch.arange(128) < 64
swap = {"component": "fc1.output", "intervention": lambda base, source: torch.where(units, source, base)}
swapped = pyvene.IntervenableModel(swap, model=model)
_, outputs = swapped({"x": base}, [{"x": source}])

# how good is it
agreement = (outputs.argmax(1) == model(base).argmax(1)).float().mean()
print(agreement)

# end
print(f"pyvene: half of a layer swapped, {float(agreement):.3f} of the answers stay")
