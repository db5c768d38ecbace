"""The architectures of the zoo, built offline from their libraries' configs at small size, with weights that are random but not
degenerate: norms, biases and running statistics are drawn too, so that a fold that forgets one is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

DYNAMIC = torch.export.Dim.DYNAMIC


@dataclass(frozen=True)
class Entry:
    """A model: how to build it, its inputs by name for a batch, and which axes of them vary.

    `build` gives a module, or the path of an ONNX file, which is asked through the ONNX host alone. `skip` says why the model
    cannot be built here (a package that is not installed); `note` what a reader of the matrix should know about it.
    """

    name: str
    family: str
    build: Callable[[], nn.Module | Path]
    inputs: Callable[[int], dict[str, torch.Tensor]]
    dynamic: tuple[int, ...] = (0,)
    output: str = ""  # the one output to compare, where the model returns several things
    skip: str = ""
    note: str = ""
    alike: bool = False  # every layer loses the same heads

    @property
    def batches(self) -> tuple[int, ...]:
        """The batch sizes to run it at: two, unless its batch is fixed."""
        return (2, 3) if self.dynamic else (2,)


ENTRIES: dict[str, Entry] = {}
MODULES = (
    "newer",
    "vision",
    "handwritten",
    "files",
    "quantised",
)  # beside this one, each adds its entries when it is imported


def entries() -> dict[str, Entry]:
    """Every model of the zoo."""
    for name in MODULES:
        if (Path(__file__).parent / f"{name}.py").exists():
            import_module(name)
    return ENTRIES


class Wrapped(nn.Module):
    """A model of transformers that takes its inputs in order, returns one tensor, and keeps no cache."""

    def __init__(self, model: nn.Module, output: str, names: list[str]) -> None:
        super().__init__()
        self.model, self.output, self.names = model, output, names

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        inputs = dict(zip(self.names, (first, second), strict=False))
        result = self.model(**inputs, return_dict=True)
        tensor: torch.Tensor = result[self.output]
        return tensor


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter and statistic anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                fan = parameter[0].numel() if parameter.dim() != 2 else parameter.shape[1]
                parameter.normal_(0.0, min(1.0, 1.2 / fan**0.5), generator=generator)
            elif "weight" in name or "gamma" in name or "scale" in name:
                parameter.uniform_(0.6, 1.4, generator=generator)
            else:
                parameter.normal_(0.0, 0.3, generator=generator)
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.6, 1.4, generator=generator)
            elif name.endswith("running_mean"):
                buffer.normal_(0.0, 0.3, generator=generator)
    return module.eval()


def add(
    name: str,
    family: str,
    build: Callable[[], nn.Module | Path],
    inputs: Callable[[int], dict[str, torch.Tensor]],
    **more: Any,
) -> None:
    ENTRIES[name] = Entry(name, family, build, inputs, **more)


def image(size: int = 32, channels: int = 3, name: str = "pixel_values") -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda batch: {
        name: torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(batch))
    }


def tokens(length: int = 7, vocabulary: int = 64, **more: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def draw(batch: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(batch)
        inputs = {"input_ids": torch.randint(2, vocabulary, (batch, length), generator=generator)}
        for extra, size in more.items():
            inputs[extra] = torch.randint(2, vocabulary, (batch, size), generator=generator)
        return inputs

    return draw


ABSENT = "" if find_spec("transformers") else "transformers is not installed: pip install transformers"


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """As if it were not installed: transformers imports torchvision where it can, and that may be one for another torch."""
    known = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if known is None:
            del sys.modules[package]
        else:
            sys.modules[package] = known


@dataclass(frozen=True)
class FromConfig:
    """A model of transformers, from its config alone."""

    config: str
    model: str
    output: str
    names: tuple[str, ...]
    options: dict[str, Any]

    def __call__(self) -> nn.Module:
        with hidden("torchvision"):
            import transformers

            transformers.utils.import_utils.is_torchvision_available.cache_clear()
            settings = getattr(transformers, self.config)(**self.options)
            settings.use_cache = False
            return Wrapped(getattr(transformers, self.model)(settings), self.output, list(self.names))


def hf(
    name: str,
    config: str,
    model: str,
    inputs: Callable[[int], dict[str, torch.Tensor]],
    output: str = "logits",
    note: str = "",
    alike: bool = False,
    **options: Any,
) -> None:
    build = FromConfig(config, model, output, tuple(inputs(1)), options)
    add(name, "transformers", build, inputs, output=output, skip=ABSENT, note=note, alike=alike)


VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
}
BERT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 32, "vocab_size": 64}
LLAMA = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 32,
    "vocab_size": 64, "max_position_embeddings": 64, "head_dim": 4,
}  # fmt: skip
hf("vit", "ViTConfig", "ViTForImageClassification", image(), **VIT)
hf("deit", "DeiTConfig", "DeiTForImageClassification", image(), **VIT)
hf("beit", "BeitConfig", "BeitForImageClassification", image(), **VIT, vocab_size=64)
hf(
    "swin",
    "SwinConfig",
    "SwinForImageClassification",
    image(),
    image_size=32,
    patch_size=2,
    embed_dim=12,
    depths=[1, 1],
    num_heads=[3, 6],
    window_size=4,
)
hf(
    "convnext",
    "ConvNextConfig",
    "ConvNextForImageClassification",
    image(),
    hidden_sizes=[8, 12, 16, 20],
    depths=[1, 1, 1, 1],
)
hf(
    "resnet",
    "ResNetConfig",
    "ResNetForImageClassification",
    image(),
    embedding_size=8,
    hidden_sizes=[16, 24],
    depths=[1, 1],
)
hf(
    "mobilenet_v2",
    "MobileNetV2Config",
    "MobileNetV2ForImageClassification",
    image(),
    image_size=32,
    depth_multiplier=0.35,
    min_depth=4,
    depth_divisible_by=4,
)
hf(
    "segformer",
    "SegformerConfig",
    "SegformerForImageClassification",
    image(64),
    hidden_sizes=[12, 12, 24, 24],
    depths=[1, 1, 1, 1],
    num_attention_heads=[3, 3, 6, 6],
    decoder_hidden_size=16,
)
hf("bert", "BertConfig", "BertForSequenceClassification", tokens(), **BERT)
hf("roberta", "RobertaConfig", "RobertaForSequenceClassification", tokens(), **BERT, max_position_embeddings=32)
hf(
    "distilbert",
    "DistilBertConfig",
    "DistilBertForSequenceClassification",
    tokens(),
    dim=24,
    n_layers=2,
    n_heads=6,
    hidden_dim=32,
    vocab_size=64,
)
hf("albert", "AlbertConfig", "AlbertForSequenceClassification", tokens(), **BERT, embedding_size=12)
hf(
    "deberta_v2",
    "DebertaV2Config",
    "DebertaV2ForSequenceClassification",
    tokens(),
    **BERT,
    relative_attention=True,
    position_buckets=8,
    pos_att_type=["p2c", "c2p"],
)
hf("electra", "ElectraConfig", "ElectraForSequenceClassification", tokens(), **BERT, embedding_size=12)
ONE_BIAS = {
    "alike": True,
    "note": "all layers add one position bias; here all lose the same heads, so that it loses them too",
}
hf("mpnet", "MPNetConfig", "MPNetForSequenceClassification", tokens(), **BERT, max_position_embeddings=32, **ONE_BIAS)
hf(
    "t5",
    "T5Config",
    "T5ForConditionalGeneration",
    tokens(decoder_input_ids=5),
    **ONE_BIAS,
    d_model=24,
    d_ff=32,
    num_layers=2,
    num_heads=6,
    d_kv=4,
    vocab_size=64,
    feed_forward_proj="gated-gelu",
)
hf(
    "bart",
    "BartConfig",
    "BartForConditionalGeneration",
    tokens(decoder_input_ids=5),
    d_model=24,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=6,
    decoder_attention_heads=6,
    vocab_size=64,
    max_position_embeddings=32,
)
hf(
    "gpt2",
    "GPT2Config",
    "GPT2LMHeadModel",
    tokens(),
    n_embd=24,
    n_layer=2,
    n_head=6,
    n_inner=32,
    vocab_size=64,
    n_positions=32,
)
hf("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", tokens(), **BERT, max_position_embeddings=32, rotary_pct=1.0)
hf(
    "opt",
    "OPTConfig",
    "OPTForCausalLM",
    tokens(),
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    ffn_dim=32,
    vocab_size=64,
    max_position_embeddings=32,
    word_embed_proj_dim=24,
)
hf("llama", "LlamaConfig", "LlamaForCausalLM", tokens(), **LLAMA)
hf("mistral", "MistralConfig", "MistralForCausalLM", tokens(), **LLAMA)
hf("qwen2", "Qwen2Config", "Qwen2ForCausalLM", tokens(), **{k: v for k, v in LLAMA.items() if k != "head_dim"})
hf("qwen3", "Qwen3Config", "Qwen3ForCausalLM", tokens(), **LLAMA)
hf(
    "phi3",
    "Phi3Config",
    "Phi3ForCausalLM",
    tokens(),
    **{k: v for k, v in LLAMA.items() if k != "head_dim"},
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=1,
)
hf("gemma", "GemmaConfig", "GemmaForCausalLM", tokens(), **LLAMA)
EXPERTS = {
    "experts_implementation": "batched_mm",
    "note": "with the library's `batched_mm` experts: torch's exporter has no ONNX for the default, a grouped product",
}
hf(
    "mixtral",
    "MixtralConfig",
    "MixtralForCausalLM",
    tokens(),
    **LLAMA,
    num_local_experts=3,
    num_experts_per_tok=2,
    **EXPERTS,
)
hf(
    "qwen2_moe",
    "Qwen2MoeConfig",
    "Qwen2MoeForCausalLM",
    tokens(),
    **{k: v for k, v in LLAMA.items() if k != "head_dim"},
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    **EXPERTS,
)
hf(
    "whisper",
    "WhisperConfig",
    "WhisperForConditionalGeneration",
    lambda b: {
        "input_features": torch.randn(b, 8, 40, generator=torch.Generator().manual_seed(b)),
        "decoder_input_ids": torch.randint(2, 60, (b, 5), generator=torch.Generator().manual_seed(b)),
    },
    d_model=24,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=6,
    decoder_attention_heads=6,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    vocab_size=64,
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
    decoder_start_token_id=1,
)
hf(
    "wav2vec2",
    "Wav2Vec2Config",
    "Wav2Vec2ForCTC",
    lambda b: {"input_values": torch.randn(b, 400, generator=torch.Generator().manual_seed(b))},
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    intermediate_size=32,
    vocab_size=16,
    conv_dim=[8, 8],
    conv_stride=[5, 2],
    conv_kernel=[10, 3],
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
    num_feat_extract_layers=2,
)
hf(
    "clip",
    "CLIPVisionConfig",
    "CLIPVisionModelWithProjection",
    image(),
    output="image_embeds",
    **VIT,
    projection_dim=12,
)
hf(
    "clip_text",
    "CLIPTextConfig",
    "CLIPTextModelWithProjection",
    tokens(),
    output="text_embeds",
    **BERT,
    max_position_embeddings=32,
    projection_dim=12,
    eos_token_id=1,
    bos_token_id=0,
)
hf(
    "detr",
    "DetrConfig",
    "DetrForObjectDetection",
    image(64),
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone=None,
    backbone_config={
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"],
    },
    d_model=24,
    encoder_layers=1,
    decoder_layers=1,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    encoder_attention_heads=6,
    decoder_attention_heads=6,
    num_queries=5,
    num_labels=4,
)  # fmt: skip
