"""Families of transformers with what the others lack: a single key head, slopes or tables of positions for each head, rotated
queries, pooled or convolved queries, gates between experts, and scans over a state."""

from __future__ import annotations

from models import BERT, EXPERTS, LLAMA, hf, image, tokens

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

# ---------------------------------------------------------------- positions that differ from head to head

hf("bloom", "BloomConfig", "BloomForCausalLM", tokens(), hidden_size=24, n_layer=2, n_head=6, vocab_size=64)
hf(
    "mpt",
    "MptConfig",
    "MptForCausalLM",
    tokens(),
    d_model=24,
    n_heads=6,
    n_layers=2,
    expansion_ratio=2,
    max_seq_len=32,
    vocab_size=64,
)
GPTJ = {"n_embd": 24, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 32, "vocab_size": 64, "n_inner": 32}
hf("codegen", "CodeGenConfig", "CodeGenForCausalLM", tokens(), **GPTJ)
hf("gptj", "GPTJConfig", "GPTJForCausalLM", tokens(), **GPTJ)

# ---------------------------------------------------------------- pooled or convolved queries

hf(
    "cvt",
    "CvtConfig",
    "CvtForImageClassification",
    image(),
    embed_dim=[12, 24],
    num_heads=[3, 6],
    depth=[1, 2],
    patch_sizes=[7, 3],
    patch_stride=[4, 2],
    patch_padding=[2, 1],
    mlp_ratio=[2.0, 2.0],
    attention_drop_rate=[0.0, 0.0],
    drop_rate=[0.0, 0.0],
    drop_path_rate=[0.0, 0.0],
    qkv_bias=[True, True],
    cls_token=[False, True],
    qkv_projection_method=["dw_bn", "dw_bn"],
    kernel_qkv=[3, 3],
    padding_kv=[1, 1],
    stride_kv=[2, 2],
    padding_q=[1, 1],
    stride_q=[1, 1],
)
hf(
    "funnel",
    "FunnelConfig",
    "FunnelForSequenceClassification",
    tokens(8),
    vocab_size=64,
    block_sizes=[1, 1],
    num_decoder_layers=1,
    d_model=24,
    n_head=6,
    d_head=4,
    d_inner=32,
)

# ---------------------------------------------------------------- scans over a state

MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
hf("mamba", "MambaConfig", "MambaForCausalLM", tokens(), **MAMBA, state_size=4, time_step_rank=4)
SCAN = {"num_heads": 8, "head_dim": 4, "n_groups": 2, "expand": 2, "chunk_size": 4}
hf("mamba2", "Mamba2Config", "Mamba2ForCausalLM", tokens(), **MAMBA, state_size=4, **SCAN)
hf(
    "jamba",
    "JambaConfig",
    "JambaForCausalLM",
    tokens(),
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    intermediate_size=32,
    vocab_size=64,
    num_experts=2,
    num_experts_per_tok=1,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    use_mamba_kernels=False,
    mamba_d_state=4,
    mamba_dt_rank=4,
    **EXPERTS,
)
hf(
    "rwkv",
    "RwkvConfig",
    "RwkvForCausalLM",
    tokens(),
    hidden_size=24,
    attention_hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    context_length=32,
    vocab_size=64,
    rescale_every=0,
)

# ---------------------------------------------------------------- latent keys, experts

LATENT = {
    **{k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 6,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
hf(
    "deepseek_v3",
    "DeepseekV3Config",
    "DeepseekV3ForCausalLM",
    tokens(),
    **LATENT,
    q_lora_rank=12,
    n_group=2,
    topk_group=1,
    **EXPERTS,
)
hf(
    "granite_moe",
    "GraniteMoeConfig",
    "GraniteMoeForCausalLM",
    tokens(),
    **{k: v for k, v in LLAMA.items() if k != "head_dim"},
    num_local_experts=3,
    num_experts_per_tok=2,
    **EXPERTS,
)

hf(
    "olmoe",
    "OlmoeConfig",
    "OlmoeForCausalLM",
    tokens(),
    **{k: v for k, v in LLAMA.items() if k != "head_dim"},
    num_experts=3,
    num_experts_per_tok=2,
    **EXPERTS,
)
hf(
    "gpt_oss",
    "GptOssConfig",
    "GptOssForCausalLM",
    tokens(),
    **LLAMA,
    num_local_experts=3,
    num_experts_per_tok=2,
    sliding_window=4,
    layer_types=["sliding_attention", "full_attention"],
    **EXPERTS,
)

# ---------------------------------------------------------------- convolutions with gates

hf(
    "efficientnet",
    "EfficientNetConfig",
    "EfficientNetForImageClassification",
    image(64),
    image_size=64,
    width_coefficient=0.25,
    depth_coefficient=0.5,
    hidden_dim=320,
    depthwise_padding=[],
)

# ---------------------------------------------------------------- norms across replaced units, windows, pooled streams

hf(
    "hiera",
    "HieraConfig",
    "HieraForImageClassification",
    image(64),
    embed_dim=12,
    image_size=[64, 64],
    patch_size=[7, 7],
    patch_stride=[4, 4],
    patch_padding=[3, 3],
    mlp_ratio=2.0,
    depths=[1, 1, 1],
    num_heads=[1, 2, 4],
    query_stride=[2, 2],
    num_query_pool=2,
    masked_unit_size=[8, 8],
    masked_unit_attention=[True, True, False],
)
hf(
    "sam",
    "SamVisionConfig",
    "SamVisionModel",
    image(),
    output="last_hidden_state",
    hidden_size=24,
    output_channels=16,
    num_hidden_layers=2,
    num_attention_heads=6,
    image_size=32,
    patch_size=8,
    window_size=2,
    global_attn_indexes=[1],
    mlp_dim=32,
)
hf(
    "poolformer",
    "PoolFormerConfig",
    "PoolFormerForImageClassification",
    image(64),
    hidden_sizes=[8, 12, 16, 20],
    depths=[1, 1, 1, 1],
    mlp_ratio=2.0,
)
hf(
    "focalnet",
    "FocalNetConfig",
    "FocalNetForImageClassification",
    image(),
    image_size=32,
    embed_dim=12,
    depths=[1, 1],
    hidden_sizes=[12, 24],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
    mlp_ratio=2.0,
)
hf(
    "modernbert",
    "ModernBertConfig",
    "ModernBertForSequenceClassification",
    tokens(),
    **BERT,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
    cls_token_id=1,
    sep_token_id=1,
    attn_implementation="sdpa",
    local_attention=4,
)
hf(
    "xlm",
    "XLMConfig",
    "XLMForSequenceClassification",
    tokens(),
    vocab_size=64,
    emb_dim=24,
    n_layers=2,
    n_heads=6,
    max_position_embeddings=32,
)
hf(
    "recurrent_gemma",
    "RecurrentGemmaConfig",
    "RecurrentGemmaForCausalLM",
    tokens(),
    hidden_size=24,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=1,
    intermediate_size=32,
    vocab_size=64,
    lru_width=24,
    attention_window_size=8,
)

# ---------------------------------------------------------------- families of every kind

hf(
    "levit",
    "LevitConfig",
    "LevitForImageClassification",
    image(128),
    image_size=128,
    hidden_sizes=[16, 24, 32],
    num_attention_heads=[2, 3, 4],
    depths=[1, 1, 1],
    key_dim=[4, 4, 4],
    mlp_ratio=[2, 2, 2],
    attention_ratio=[2, 2, 2],
)
hf(
    "xlnet",
    "XLNetConfig",
    "XLNetForSequenceClassification",
    tokens(),
    d_model=24,
    n_layer=2,
    n_head=6,
    d_inner=32,
    vocab_size=64,
)
NARROW = {k: v for k, v in LLAMA.items() if k != "head_dim"}
hf(
    "bamba",
    "BambaConfig",
    "BambaForCausalLM",
    tokens(),
    **NARROW,
    attn_layer_indices=[1],
    mamba_n_heads=12,
    mamba_d_head=4,
    mamba_n_groups=1,
    mamba_d_state=4,
    mamba_chunk_size=4,
)
hf(
    "lfm2",
    "Lfm2Config",
    "Lfm2ForCausalLM",
    tokens(),
    **NARROW,
    full_attn_idxs=[1],
    block_auto_adjust_ff_dim=False,
)
hf("apertus", "ApertusConfig", "ApertusForCausalLM", tokens(), **NARROW)
hf(
    "canine",
    "CanineConfig",
    "CanineForSequenceClassification",
    tokens(16),
    **{k: v for k, v in BERT.items() if k != "vocab_size"},
    max_position_embeddings=64,
    num_hash_buckets=32,
    local_transformer_stride=4,
    downsampling_rate=4,
)
