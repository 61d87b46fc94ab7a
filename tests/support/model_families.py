"""Families of models in `transformers` that are sampled and trained, or refused by name, with tiny configurations.

`make test WITH=models` runs all of them, and `scripts/write_models.py` writes this table to `docs/reference/models.md`.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 64
"""Tokens of a sliding window or a chunk, fewer than the longest prompts of the tests."""
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PER_LAYER = (*DENSE, "per_layer_model_projection", "per_layer_projection", "per_layer_input_gate")
TIED = {"tie_word_embeddings": True}
HEADS = {"head_dim": 8}
SLIDING = {"sliding_window": WINDOW}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA3 = HEADS | TIED | MIXED | {"query_pre_attn_scalar": 8}
SHARING = SLIDING | {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_chunk_size": 16}


def partial_rotary(share: float) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share},
        "partial_rotary_factor": share,
    }


class Family(NamedTuple):
    """`lora` are the modules that `all-linear` selects; `packed` whether rows are packed into prefix trees.

    `settings` are added to those of `SIZES` that the configuration has. `refused` is a part of the reason to refuse it.
    """

    name: str
    model_type: str
    settings: Mapping[str, Any] = MappingProxyType({})
    has: str = ""
    lora: tuple[str, ...] = DENSE
    packed: bool = True
    refused: str = ""

    @property
    def key(self) -> str:
        """Of its tests, for `pytest -k`."""
        return re.sub(r"\W+", "_", self.name.lower()).strip("_")


def tiny_config(model_type: str = "llama", **settings: Any) -> Any:
    """A configuration of a few ten thousand parameters."""
    kind = CONFIG_MAPPING[model_type]
    named = {kind.attribute_map.get(key, key): value for key, value in (SIZES | settings).items()}
    own = {key: value for key, value in named.items() if key in settings or key in kind.__dataclass_fields__}
    return AutoConfig.for_model(model_type, **own)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
SERVED = [
    Family("Llama 2, 3", "llama"),
    Family("Llama 3.2", "llama", TIED | {"rope_parameters": LLAMA3_ROPE}, "tied embeddings, scaled rotary embeddings"),
    Family(
        "Llama 4 (text)",
        "llama4_text",
        HEADS | EXPERTS | {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
            "intermediate_size_mlp": 64, "attention_chunk_size": WINDOW, "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"]},
        "chunks and full attention, layers without positions, experts",
        ATTENTION,
        packed=False,
    ),
    Family("Mistral 7B", "mistral", SLIDING, "a sliding window in all layers"),
    Family("Ministral", "ministral", HEADS | MIXED, "sliding windows and full attention"),
    Family("Ministral 3", "ministral3", HEADS | {"rope_parameters": YARN}, "queries scaled by position"),
    Family("Mixtral", "mixtral", EXPERTS, "experts", ATTENTION),
    Family("Qwen2, Qwen2.5", "qwen2", TIED, "tied embeddings"),
    Family("Qwen2 with windows", "qwen2", SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
        "a sliding window in the last layers"),
    Family("Qwen1.5-MoE", "qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}, "experts", ATTENTION),
    Family("Qwen3", "qwen3", HEADS, "normalized queries and keys"),
    Family("Qwen3-MoE", "qwen3_moe", HEADS | EXPERTS, "experts", ATTENTION),
    Family("Gemma", "gemma", HEADS | TIED, "tied embeddings"),
    Family("Gemma 2", "gemma2", HEADS | TIED | MIXED | {"query_pre_attn_scalar": 8},
        "sliding windows and full attention, soft-capped scores and logits", packed=False),
    Family("Gemma 3 (text)", "gemma3_text", GEMMA3, "sliding windows and full attention"),
    Family("Gemma 3 (with images)", "gemma3", {
        "text_config": tiny_config("gemma3_text", max_position_embeddings=512, **GEMMA3).to_dict(),
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}, "the same, trained on text"),
    Family("Gemma 3n (text)", "gemma3n_text", HEADS | SHARING | {"intermediate_size": [64] * 4, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4, "altup_correct_scale": False},
        "layers that share keys and values, inputs for each layer",
        (*PER_LAYER, "linear_left", "linear_right", "altup_projections", "altup_unembed_projections",
            "prediction_coefs", "correction_coefs", "modality_router")),
    Family("Gemma 4 (text)", "gemma4_text", HEADS | SHARING | {"global_head_dim": 16},
        "layers that share keys and values, inputs for each layer", PER_LAYER),
    Family("Phi-1, Phi-2", "phi", partial_rotary(0.5), "partial rotary embeddings",
        ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")),
    Family("Phi-3, Phi-4", "phi3", partial_rotary(0.75), "fused projections, partial rotary embeddings",
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    Family("SmolLM3", "smollm3", TIED | {"no_rope_layers": [1, 0]}, "layers without positions"),
    Family("Granite 3", "granite", TIED | {"embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.3}, "multipliers"),
    Family("Granite MoE", "granitemoe", EXPERTS | {"logits_scaling": 2.0}, "multipliers, experts", ATTENTION),
    Family("OLMo 2", "olmo2", {}, "norms after the layers"),
    Family("OLMo 3", "olmo3", MIXED, "sliding windows and full attention"),
    Family("GPT-2", "gpt2", {}, "embedded positions, transposed projections", ("c_attn", "c_proj", "c_fc")),
    Family("OLMoE", "olmoe", EXPERTS, "experts", ATTENTION),
    Family("Seed-OSS", "seed_oss", HEADS),
    Family("ERNIE 4.5", "ernie4_5", HEADS | TIED, "tied embeddings"),
    Family("Nemotron", "nemotron", {}, "partial rotary embeddings", (*ATTENTION, "up_proj", "down_proj"), False),
    Family("OPT", "opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, "embedded positions",
        ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")),
    Family("Falcon 7B", "falcon", {}, "one key for all queries, parallel layers",
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), False),
    Family("MPT", "mpt", {"max_seq_len": 512}, "linear biases instead of positions",
        ("Wqkv", "out_proj", "up_proj", "down_proj"), False),
    Family("GPT-NeoX, Pythia", "gpt_neox", partial_rotary(0.5), "partial rotary embeddings, fused projections",
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
    Family("StableLM", "stablelm", partial_rotary(0.5), "partial rotary embeddings", packed=False),
    Family("StarCoder2", "starcoder2", SLIDING, "a sliding window in all layers",
        (*ATTENTION, "c_fc", "c_proj")),
    Family("Command R", "cohere", TIED | {"use_qk_norm": True}, "scaled logits, parallel layers"),
    Family("Command R7B", "cohere2", TIED | MIXED, "sliding windows, full attention without positions"),
    Family("EXAONE 4", "exaone4", SLIDING | {"sliding_window_pattern": 2}, "sliding windows and full attention"),
    Family("gpt-oss", "gpt_oss", HEADS | MIXED | EXPERTS, "attention sinks, sliding windows, experts", ATTENTION,
        packed=False),
    Family("DeepSeek-V3", "deepseek_v3", MLA, "latent attention, experts",
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), packed=False),
    Family("GLM-4", "glm4", HEADS | partial_rotary(0.5), "partial rotary embeddings",
        (*ATTENTION, "gate_up_proj", "down_proj")),
    Family("GLM-4.5", "glm4_moe", HEADS | MLA | {"num_key_value_heads": 2}, "partial rotary embeddings, experts",
        ATTENTION),
]  # fmt: skip
REFUSED = [
    Family("Mamba", "mamba", {"state_size": 4}, refused="their linear_attention layers keep a state"),
    Family("Mamba 2", "mamba2", {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
        refused="their linear_attention layers keep a state"),
    Family("Falcon-H1", "falcon_h1", MAMBA, refused="their hybrid layers keep a state"),
    Family("Jamba", "jamba", EXPERTS | {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        "attn_layer_period": 2, "attn_layer_offset": 1}, refused="their linear_attention layers keep a state"),
    Family("Zamba2", "zamba2", {"mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"]}, refused="their hybrid, linear_attention layers keep a state"),
    Family("LFM2", "lfm2", {"layer_types": ["conv", "full_attention"]}, refused="their conv layers keep a state"),
    Family("Qwen3-Next", "qwen3_next", HEADS | EXPERTS | {"linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"]}, refused="their linear_attention layers keep a state"),
    Family("Granite 4 hybrids", "granitemoehybrid", EXPERTS | MAMBA | {"shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"]}, refused="their linear_attention layers keep a state"),
    Family("BLOOM", "bloom", refused="their forward pass over cached keys and values fails"),
]  # fmt: skip
FAMILIES = {family.name: family for family in (*SERVED, *REFUSED)}
