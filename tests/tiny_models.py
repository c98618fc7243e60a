"""Tiny Transformers models with random weights, one per family, for tests of an engine.

The next token of a freshly initialised model hardly depends on its input. Here weights have a
larger spread: the largest logit is clear, norms, sinks and biases change the result, and greedy
text does not repeat one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt2",
    "opt",
    "phi3",
    "gpt_neox",
    "gpt_oss",
    "olmo2",
    "mixtral",
)
"""Families that call Transformers' attention interface and run on a paged cache."""

ADAPTED = (
    "bloom",
    "mpt",
    "falcon",
    "falcon_grouped",
    "falcon_alibi",
    "falcon_alibi_multi_query",
    "gptj",
    "gpt_neo",
)
"""Families whose attention modules do not call it, and are adapted for the length of a step."""

UNUSUAL = ("gemma3n", "stablelm", "deepseek_v3", "glm", "qwen3_moe", "longcat_flash")
"""More families that run: layers share keys (gemma3n), layers do not pass keyword arguments on to
their attention (stablelm), values are narrower than keys (deepseek_v3), the rotary embedding
rotates neighbouring elements (glm), only some layers have experts (qwen3_moe), layers have two
attention modules, called by argument names alone (longcat_flash)."""

EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Families with a mixture of experts."""

REFUSED = ("codegen", "mamba", "qwen3_next", "bert")
"""Families that are refused: attention outside of the interface (codegen), no attention (mamba),
linear attention in some layers (qwen3_next), bidirectional attention (bert)."""

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NARROW: dict[str, Any] = {"hidden_size": 48, "head_dim": 16}
_WINDOW: dict[str, Any] = {"sliding_window": 7}
_ALTERNATING: dict[str, Any] = {
    **_WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Options of a family's config beyond _COMMON.
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _NARROW,
    "qwen2": {},
    "qwen3": _NARROW,
    "mistral": {**_NARROW, **_WINDOW},
    "gemma2": {
        **_NARROW,
        **_ALTERNATING,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3": {**_NARROW, **_ALTERNATING, "query_pre_attn_scalar": 24},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 80},
    "phi3": {"sliding_window": 9},
    "gpt_neox": {},
    "gpt_oss": {
        **_NARROW,
        **_ALTERNATING,
        **_EXPERTS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "olmo2": {},
    "mixtral": {**_NARROW, **_EXPERTS, "sliding_window": None},
    "gemma3n": {
        **_NARROW,
        **_WINDOW,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [
            f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "sliding")
        ],
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
    },
    "stablelm": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "glm": {"head_dim": 16},
    "qwen3_moe": {
        **_NARROW,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
    "longcat_flash": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 16,
    },
    "bloom": {"num_attention_heads": 6, "hidden_size": 96},
    # MPT has its own slopes for a number of heads that is not a power of two.
    "mpt": {
        "num_attention_heads": 6,
        "hidden_size": 96,
        "max_seq_len": 256,
        "attn_config": {"clip_qkv": 1.5, "alibi_bias_max": 4, "softmax_scale": 0.3},
    },
    "falcon": {"ffn_hidden_size": 80, "multi_query": True, "bias": True},
    "falcon_grouped": {"ffn_hidden_size": 80, "new_decoder_architecture": True, "num_kv_heads": 2},
    # Twelve heads have slopes that are not powers of two: Falcon rounds their products.
    "falcon_alibi": {
        "num_attention_heads": 12,
        "hidden_size": 96,
        "ffn_hidden_size": 80,
        "multi_query": False,
        "parallel_attn": False,
        "alibi": True,
        "bias": True,
    },
    "falcon_alibi_multi_query": {
        "num_attention_heads": 12,
        "hidden_size": 96,
        "ffn_hidden_size": 80,
        "alibi": True,
    },
    "gptj": {"rotary_dim": 8, "n_inner": 80},
    "gpt_neo": {"attention_types": [[["local", "global", "local"], 1]], "window_size": 7},
    "codegen": {"rotary_dim": 8, "n_inner": 80},
    "mamba": {},
    "qwen3_next": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 16},
    "bert": {"is_decoder": False},
}
_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "falcon_grouped": "falcon",
    "falcon_alibi": "falcon",
    "falcon_alibi_multi_query": "falcon",
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a family's tiny model, with changes."""
    from transformers import AutoConfig

    options = {**_COMMON, **_CONFIGS[family], **changes}
    return AutoConfig.for_model(_MODEL_TYPES.get(family, family), **options)


def tiny_model(
    family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Return a family's tiny model, in evaluation mode on the CPU.

    Args:
        family: One of ``FAMILIES``, ``ADAPTED``, ``UNUSUAL`` or ``REFUSED``.
        seed: The same seed gives the same weights; torch's own generator is not touched.
        dtype: Type of the weights, which are rounded from the same float32 values.
        **changes: Options of its config to replace.

    Examples:
        >>> model = tiny_model("mistral")
        >>> model.config.sliding_window, model.num_parameters() < 200_000
        (7, True)
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    # Gemma multiplies its embeddings by the root of hidden_size.
    embedding_scale = 0.15 if family.startswith("gemma") else 1.0
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in name or "wte" in name:
            noise *= embedding_scale
        with torch.no_grad():
            parameter.copy_(_shape_noise(name, parameter, noise))
    # Not .to(dtype): the rotary frequencies must stay float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def _shape_noise(name: str, parameter: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith("sinks"):
        return 1.5 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if parameter.ndim == 1:  # a norm, around 1 or (Gemma's) around 0
        return parameter + 0.3 * noise
    if "embed" in name or "wte" in name or "wpe" in name:
        return noise
    return noise * (0.5 if "lm_head" in name else 0.2)
