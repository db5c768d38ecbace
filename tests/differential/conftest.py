"""Small models on shared cores: one thread each."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
