"""Write transformers as onnxruntime's own tools optimise them offline: python optimised.py FOLDER

A process of its own: exporters warn, and an installed torchvision that does not fit torch must not be found.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

sys.modules["torchvision"] = None  # type: ignore[assignment]

import onnxruntime as ort  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from onnxruntime.transformers import optimizer  # noqa: E402
from onnxruntime.transformers.fusion_options import FusionOptions  # noqa: E402
from torch import nn  # noqa: E402

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
TEXT = {"vocab_size": 50, "max_position_embeddings": 32}
NO_CACHE = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


class FirstOutput(nn.Module):
    """A model called by position, without the names around its result."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        output = self.model(**dict(zip(self.names, inputs, strict=True)))[0]
        assert isinstance(output, torch.Tensor)
        return output


def bert(attention: str) -> nn.Module:
    config = transformers.BertConfig(**SMALL, **TEXT, attn_implementation=attention)
    return FirstOutput(transformers.BertModel(config, add_pooling_layer=False), ("input_ids", "attention_mask"))


def gpt2(attention: str) -> nn.Module:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": 48, "n_positions": 32, "vocab_size": 50}
    config = transformers.GPT2Config(**sizes, **NO_CACHE, attn_implementation=attention)
    return FirstOutput(transformers.GPT2LMHeadModel(config), ("input_ids", "attention_mask"))


def llama(attention: str) -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, **TEXT, **NO_CACHE, num_key_value_heads=2, attn_implementation=attention)
    return FirstOutput(transformers.LlamaForCausalLM(config), ("input_ids", "attention_mask"))


def vit(attention: str) -> nn.Module:
    config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=5, attn_implementation=attention)
    return FirstOutput(transformers.ViTForImageClassification(config), ("pixel_values",))


def inputs(names: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
    if names == ("pixel_values",):
        return (torch.randn(2, 3, 16, 16),)
    return torch.randint(0, 50, (2, 7)), torch.ones(2, 7, dtype=torch.long)


def export(build: Callable[[str], nn.Module], path: Path, *, dynamo: bool) -> None:
    torch.manual_seed(0)
    model = build("sdpa" if dynamo else "eager").eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() or ".ln_" in name:
            nn.init.normal_(parameter, mean=1.0 if name.endswith("weight") else 0.0, std=0.2)
    names = model.names
    assert isinstance(names, tuple)
    given = inputs(names)
    options = {"input_names": list(names), "output_names": ["y"]}
    if dynamo:
        shapes = (tuple({0: torch.export.Dim.DYNAMIC} for _ in given),)
        torch.onnx.export(
            model, given, path, dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False, **options
        )
    else:
        axes = {name: {0: "batch"} for name in names}
        torch.onnx.export(model, given, path, dynamo=False, dynamic_axes=axes, opset_version=17, **options)


def session_dump(source: Path, target: Path) -> None:
    """What onnxruntime makes of a model when it loads it, for any processor."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath, options.log_severity_level = str(target), 3
    ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def by_optimizer(source: Path, target: Path, kind: str, *, separate: bool = False) -> None:
    """onnxruntime.transformers.optimizer, with one op for attention or with separate projections."""
    options = FusionOptions(kind)
    options.use_multi_head_attention = separate
    optimised = optimizer.optimize_model(
        str(source), model_type=kind, num_heads=4, hidden_size=32, opt_level=0, optimization_options=options
    )
    optimised.save_model_to_file(str(target))


def main(folder: Path) -> None:
    export(bert, folder / "bert.onnx", dynamo=False)
    by_optimizer(folder / "bert.onnx", folder / "bert-attention.onnx", "bert")
    by_optimizer(folder / "bert.onnx", folder / "bert-multi-head.onnx", "bert", separate=True)
    session_dump(folder / "bert.onnx", folder / "bert-session.onnx")
    export(gpt2, folder / "gpt2.onnx", dynamo=False)
    by_optimizer(folder / "gpt2.onnx", folder / "gpt2-optimizer.onnx", "gpt2")
    export(llama, folder / "llama.onnx", dynamo=False)
    by_optimizer(folder / "llama.onnx", folder / "llama-optimizer.onnx", "gpt2")
    session_dump(folder / "llama.onnx", folder / "llama-session.onnx")
    export(vit, folder / "vit.onnx", dynamo=True)
    session_dump(folder / "vit.onnx", folder / "vit-session.onnx")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        main(Path(sys.argv[1]))
