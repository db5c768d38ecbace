"""Families of transformers with what the others lack: a single key head, attention by cosines, rotated queries, grouped convolutions."""

from __future__ import annotations

from models import BERT, hf, image, tokens

hf(
    "falcon",
    "FalconConfig",
    "FalconForCausalLM",
    tokens(),
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    vocab_size=64,
    ffn_hidden_size=32,
    multi_query=True,
    new_decoder_architecture=False,
)
hf("roformer", "RoFormerConfig", "RoFormerForSequenceClassification", tokens(), **BERT, max_position_embeddings=32)
hf(
    "swin_v2",
    "Swinv2Config",
    "Swinv2ForImageClassification",
    image(),
    image_size=32,
    patch_size=4,
    embed_dim=12,
    depths=[1, 1],
    num_heads=[3, 6],
    window_size=4,
    mlp_ratio=2.0,
)
hf(
    "regnet",
    "RegNetConfig",
    "RegNetForImageClassification",
    image(),
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 1],
    groups_width=4,
    layer_type="y",
)
