"""Names that vLLM has and pagetile lacks, and what to use instead.

``keywords`` puts them into errors; the guide "Coming from vLLM" lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ASYNC_LLM_NAMES",
    "CALL_OPTIONS",
    "LLM_NAMES",
    "LLM_OPTIONS",
    "MODULE_NAMES",
    "SAMPLING_OPTIONS",
    "STRUCTURED_OPTIONS",
]

_ONE_DEVICE = "a model runs on one device, leave it out"
_LOCAL = "nothing is downloaded, give a directory as model"
_NO_LORA = "there are no adapters here, merge them into the weights"
_TEXT_ONLY = "models here generate text from text"
_LOGITS = "SamplingParams has logit_bias, allowed_token_ids, bad_words and structured_outputs"
_SAMPLES = "ask for n samples with logprobs=0 and compare cumulative_logprob"
_KINDS = (
    "AsyncLLM.generate yields all so far, AsyncLLM.stream and LLM.stream what is new, "
    "LLM.generate the end"
)

LLM_OPTIONS: Mapping[str, str] = {
    "gpu_memory_utilization": "memory_fraction is a share of the free memory",
    "num_gpu_blocks_override": "num_blocks",
    "speculative_config": "speculative='ngram' and num_speculative_tokens",
    "enable_chunked_prefill": "long prompts are always cut, leave it out",
    "tensor_parallel_size": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE,
    "data_parallel_size": _ONE_DEVICE,
    "distributed_executor_backend": _ONE_DEVICE,
    "disable_custom_all_reduce": _ONE_DEVICE,
    "trust_remote_code": "no code from a checkpoint is run, leave it out",
    "revision": _LOCAL,
    "tokenizer_revision": _LOCAL,
    "download_dir": _LOCAL,
    "hf_token": _LOCAL,
    "hf_overrides": "change the directory's config.json",
    "load_format": "weights are safetensors, leave it out",
    "quantization": "weights are not quantised here, give a checkpoint of 16 or 32 bits",
    "tokenizer_mode": "Transformers chooses, or give a tokenizer as tokenizer",
    "skip_tokenizer_init": "a loaded model has no tokenizer unless tokenizer is given",
    "swap_space": "preempted sequences are computed again, leave it out",
    "cpu_offload_gb": "weights stay on one device, leave it out",
    "max_logprobs": "there is no limit, leave it out",
    "disable_log_stats": "nothing is logged, leave it out",
    "compilation_config": "steps are CUDA graphs unless enforce_eager, leave it out",
    "cuda_graph_sizes": "sizes are chosen, leave it out",
    "override_generation_config": "give SamplingParams with the prompts",
    "structured_outputs_config": "llguidance follows all forms, leave it out",
    "enable_lora": _NO_LORA,
    "runner": _TEXT_ONLY,
    "task": _TEXT_ONLY,
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "logits_processors": _LOGITS,
}
"""Options of vLLM's ``LLM``, and what to do instead."""

CALL_OPTIONS: Mapping[str, str] = {
    "lora_request": _NO_LORA,
    "prompt_token_ids": "prompts are text, or token ids, or a list of them",
    "priority": "requests run in the order of arrival, leave it out",
    "tokenization_kwargs": "give the token ids as the prompt",
    "chat_template_content_format": "the template decides, leave it out",
    "mm_processor_kwargs": _TEXT_ONLY,
}
"""Options of vLLM's ``generate`` and ``chat``, and what to do instead."""

SAMPLING_OPTIONS: Mapping[str, str] = {
    "output_kind": _KINDS,
    "guided_decoding": "structured_outputs=StructuredOutputsParams(...)",
    "flat_logprobs": "logprobs are stored flat anyway, leave it out",
    "logprob_token_ids": "logprobs=k reports the k likeliest, and allowed_token_ids restricts them",
    "logits_processors": _LOGITS,
    "spaces_between_special_tokens": "the tokenizer decides, leave it out",
    "truncate_prompt_tokens": "cut the token ids of the prompt",
    "skip_reading_prefix_cache": "LLM(enable_prefix_caching=False), or a cache_salt of its own",
    "extra_args": "there are no plugins, leave it out",
    "thinking_token_budget": "max_tokens bounds the whole output",
    "best_of": _SAMPLES,
    "use_beam_search": _SAMPLES,
}
"""Options of vLLM's ``SamplingParams``, and what to do instead."""

STRUCTURED_OPTIONS: Mapping[str, str] = {
    "whitespace_pattern": "disable_any_whitespace, or a grammar",
    "disable_additional_properties": "'additionalProperties': false in the schema",
    "structural_tag": "a grammar",
}
"""Options of vLLM's ``StructuredOutputsParams``, and what to do instead."""

_POOLING = (
    "models here generate text; of a prompt's tokens, SamplingParams(prompt_logprobs=0, "
    "max_tokens=1) gives the log-probabilities"
)

LLM_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _POOLING),
    "from_engine_args": "LLM(model, ...)",
    "beam_search": _SAMPLES,
    "llm_engine": "engine",
    "model_config": "engine.max_model_len, engine.model.config",
    "set_tokenizer": "LLM(tokenizer=...)",
    "sleep": "delete it, and load it again",
    "wake_up": "delete it, and load it again",
    "collective_rpc": "the model is engine.model, in this process",
    "apply_model": "the model is engine.model, in this process",
    "get_metrics": "engine.counts, and metrics of each RequestOutput",
    "start_profile": "torch.profiler sees all, in this process",
}
"""Attributes of vLLM's ``LLM``, and what to do instead."""

ASYNC_LLM_NAMES: Mapping[str, str] = {
    "encode": _POOLING,
    "from_engine_args": "AsyncLLM.load(model, ...)",
    "add_request": "submit",
    "shutdown": "await close(), or async with",
    "is_running": "is_alive",
    "errored": "is_alive, and death says why",
    "dead_error": "death",
    "check_health": "is_alive",
    "model_config": "engine.max_model_len, engine.model.config",
    "reset_prefix_cache": "await run_in_engine(engine.reset_prefix_cache)",
    "pause_generation": "drain() waits for what runs and accepts nothing more",
}
"""Attributes of vLLM's ``AsyncLLM``, and what to do instead."""

MODULE_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("EngineArgs", "LLMEngine"), "LLM(model, ...)"),
    **dict.fromkeys(("AsyncEngineArgs", "AsyncLLMEngine"), "AsyncLLM.load(model, ...)"),
    **dict.fromkeys(
        ("RequestOutput", "CompletionOutput"), "import it from pagetile.engine.outputs"
    ),
    "TextPrompt": "give a dictionary, {'prompt': text}",
    "TokensPrompt": "give a dictionary, {'prompt_token_ids': ids}",
    "GuidedDecodingParams": "StructuredOutputsParams",
    "RequestOutputKind": _KINDS,
    "BeamSearchParams": _SAMPLES,
    "PoolingParams": _POOLING,
    "LoRARequest": _NO_LORA,
}
"""Names that scripts import from vLLM, and what to do instead."""
