"""A model runs exactly or is refused: which are refused, when, and with which message."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from tiny_models import REFUSED, tiny_config, tiny_model

from pagetile import LLM, RequestError, SamplingParams, UnsupportedError
from pagetile.kv_cache.storage import LayerSpec
from pagetile.models import attention as attention_module
from pagetile.models import load_model, paged_model
from pagetile.models.probe import AttentionCall, describe_layers
from pagetile.models.support import check_config, find_limit


def config_of(model_type: str, **options):
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **options)


INTERFACE = "do not call Transformers' attention interface"
STATE = "keeps a recurrent or convolution state"
ENCODER = "is an encoder"

REASONS = {
    "codegen": INTERFACE,
    "xglm": INTERFACE,
    "mamba": STATE,
    "qwen3_next": STATE,
    "jamba": STATE,
    "bamba": STATE,
    "bert": ENCODER,
    "roberta": ENCODER,
    "t5": "is an encoder-decoder",
    "whisper": "is an encoder-decoder",
    "vit": "is not a causal language model",
    "deepseek_v32": "layers of a kind that does not run: indexed_attention",
    "llama4_text": r"is chunked: set max_model_len to at most 8192, one chunk",
}


@pytest.mark.parametrize("model_type", REASONS)
def test_a_config_alone_is_reason_enough(model_type):
    with pytest.raises(
        UnsupportedError, match=f"model type '{model_type}' cannot run.*{REASONS[model_type]}"
    ):
        check_config(config_of(model_type))


def test_convolutions_between_attention_layers_are_a_state():
    kinds = ["conv", "full_attention", "conv"]
    with pytest.raises(UnsupportedError, match=STATE):
        check_config(config_of("lfm2", num_hidden_layers=3, layer_types=kinds))


def test_bidirectional_options_of_a_decoder_are_refused():
    with pytest.raises(UnsupportedError, match="attention is bidirectional"):
        check_config(tiny_config("gemma3", use_bidirectional_attention=True))


def test_a_decoder_that_says_otherwise_is_none():
    config = tiny_config("gpt_neox")
    assert config.is_decoder is False
    check_config(config)


@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_model_is_refused_when_it_is_given_as_a_model(family):
    with pytest.raises(UnsupportedError, match=REASONS[family]):
        load_model(tiny_model(family))


@pytest.mark.parametrize("family", REFUSED)
def test_a_directory_is_refused_before_its_weights_are_looked_for(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family).to_dict()))
    with pytest.raises(UnsupportedError, match=REASONS[family]):
        load_model(tmp_path)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(
        UnsupportedError, match="gives no logits: load it with its language model head"
    ):
        load_model(tiny_model("llama").model)


def test_an_argument_that_is_no_model_is_refused():
    with pytest.raises(RequestError, match="model is a Linear, expected a directory or"):
        load_model(torch.nn.Linear(2, 2))


# What only shows when a model runs: models that were tampered with.


def test_a_layer_that_is_called_twice_is_refused():
    model = tiny_model("llama")
    model.model.layers[2] = model.model.layers[1]
    with pytest.raises(
        UnsupportedError, match=r"'model\.layers\.1\.self_attn' calls .* 2 times in a forward"
    ):
        load_model(model)


def test_a_layer_that_does_not_call_the_interface_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].self_attn.forward = lambda hidden_states, **others: (hidden_states, None)
    with pytest.raises(UnsupportedError, match="only 2 of its 3 layers call"):
        load_model(model)


def break_attention(model, monkeypatch, **changes) -> None:
    """Make what a model passes to its attention function differ from its eager forward."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    get_interface = type(ALL_ATTENTION_FUNCTIONS).get_interface

    def pick(self, name, default):
        function = get_interface(self, name, default)
        if name == "eager":
            return function
        return lambda *args, **options: function(*args, **{**options, **changes})

    monkeypatch.setattr(type(ALL_ATTENTION_FUNCTIONS), "get_interface", pick)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"scaling": 0.26}),  # 0.25 is right
        ("gpt2", {"scaling": None}),
        ("opt", {"scaling": None}),
        ("gemma2", {"softcap": None}),
        ("gemma2", {"softcap": 3.1}),
        ("gpt_oss", {"s_aux": None}),
    ],
)
def test_an_attention_that_computes_what_it_does_not_tell_is_refused(family, changes, monkeypatch):
    load_model(tiny_model(family))
    break_attention(tiny_model(family), monkeypatch, **changes)
    with pytest.raises(UnsupportedError, match="logits differ from those of its own eager forward"):
        load_model(tiny_model(family))


@pytest.mark.parametrize("told", [None, 6, 8])
def test_a_window_that_is_told_wrong_is_refused(told, monkeypatch):
    break_attention(tiny_model("mistral"), monkeypatch, sliding_window=told)
    with pytest.raises(
        UnsupportedError, match=r"layer 'model\.layers\.0\.self_attn': its own mask"
    ):
        load_model(tiny_model("mistral"))


def test_a_window_is_compared_far_beyond_the_tokens_of_the_proof(monkeypatch):
    options = {"sliding_window": 4096, "max_position_embeddings": 1 << 17}
    assert load_model(tiny_model("mistral", **options)).layers[0].sliding_window == 4096
    break_attention(tiny_model("mistral"), monkeypatch, sliding_window=4097)
    with pytest.raises(UnsupportedError, match="hides position"):
        load_model(tiny_model("mistral", **options))


def chunked_model(**changes):
    from transformers import AutoModelForCausalLM

    options = tiny_config("llama").to_dict()
    del options["model_type"]
    options |= {"attention_chunk_size": 32, "num_local_experts": 2, "intermediate_size_mlp": 80}
    options |= changes
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of("llama4_text", **options))


def test_chunked_attention_runs_within_one_chunk():
    model = chunked_model()
    assert load_model(model, max_model_len=32).max_model_len == 32
    with pytest.raises(UnsupportedError, match="set max_model_len to at most 32"):
        load_model(model, max_model_len=33)


def test_tokens_that_are_counted_in_the_step_stay_below_what_is_counted_to():
    model = chunked_model(attention_chunk_size=64, floor_scale=32)
    with pytest.raises(UnsupportedError, match="set max_model_len to at most 31"):
        load_model(model, max_model_len=32)
    with pytest.raises(RequestError, match="with at most 31 tokens a step"):
        LLM(model, max_model_len=31, num_blocks=8)
    llm = LLM(model, max_model_len=31, num_blocks=8, max_num_batched_tokens=31, max_num_seqs=4)
    prompts = [list(range(3, 3 + n)) for n in (20, 17, 9)]
    params = SamplingParams(temperature=0, min_tokens=8, max_tokens=8)
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
        assert list(output.outputs[0].token_ids) == expected[0, len(prompt) :].tolist()


def test_a_chunk_longer_than_the_proof_shows_in_the_mask(monkeypatch):
    monkeypatch.setattr("pagetile.models.paged_model.check_config", lambda *args: None)
    with pytest.raises(UnsupportedError, match="its own mask hides position 0 to position 32"):
        load_model(chunked_model())


def test_a_mask_that_hides_nothing_is_noticed():
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80}
    config = config_of("bert-generation", num_hidden_layers=2, num_attention_heads=4, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match="asks for bidirectional attention"):
        load_model(model)
    for layer in model.bert.encoder.layer:
        layer.attention.self.is_causal = True
    with pytest.raises(UnsupportedError, match="its own mask shows position 1 to position 0"):
        load_model(model)


@pytest.mark.parametrize(
    ("windows", "kept"), [((7, 9), 9), ((9, 7), 9), ((7, None), None), ((None, 7), None)]
)
def test_shared_keys_stay_for_the_widest_window(windows, kept):
    model = tiny_model("llama", num_hidden_layers=2)
    key, value = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 8)
    calls = [
        AttentionCall(layer.self_attn, key, key, value, None, {"sliding_window": window}, value)
        for layer, window in zip(model.model.layers, windows, strict=True)
    ]
    layers, specs = describe_layers(model, calls, None)
    assert [(layer.index, layer.writes) for layer in layers] == [(0, True), (0, False)]
    assert specs == (LayerSpec(2, 16, 8, sliding_window=kept),)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias to its attention"),
        ({"block_indices": [1]}, "passes block_indices to its attention"),
        ({"is_causal": False}, "asks for bidirectional attention"),
        ({"dropout": 0.1}, r"asks for dropout=0\.1"),
    ],
)
def test_an_option_that_would_change_the_result_is_refused(changes, reason, monkeypatch):
    break_attention(tiny_model("llama"), monkeypatch, **changes)
    with pytest.raises(UnsupportedError, match=reason):
        load_model(tiny_model("llama"))


def test_an_unknown_option_without_a_value_is_let_through(monkeypatch):
    break_attention(tiny_model("llama"), monkeypatch, position_bias=None)
    load_model(tiny_model("llama"))


def test_a_mask_of_the_models_own_is_refused():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, options: (
                args,
                {**options, "attention_mask": torch.zeros(1, 1, 1, 1)},
            ),
            with_kwargs=True,
        )
    with pytest.raises(UnsupportedError, match="attention mask of its own making"):
        load_model(model)


def test_what_passes_from_token_to_token_beside_the_cache_is_refused():
    model = tiny_model("llama")

    def leak(module, args, output):
        return output + 0.3 * output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(leak)
    with pytest.raises(UnsupportedError, match=r"first chunk: relative error .*1\.0e-04 expected"):
        load_model(model)


def test_one_wrong_token_is_enough():
    model = tiny_model("llama")

    def favour_the_first(module, args, output):
        return torch.cat([1.5 * output[:, :1], output[:, 1:]], dim=1)

    model.model.layers[-1].mlp.register_forward_hook(favour_the_first)
    with pytest.raises(UnsupportedError, match="first chunk: relative error"):
        load_model(model)


def test_positions_of_the_models_own_are_refused():
    model = tiny_model("gpt2")
    model.transformer.register_forward_pre_hook(
        lambda module, args, options: (args, {**options, "position_ids": None}), with_kwargs=True
    )
    with pytest.raises(UnsupportedError, match="logits differ"):
        load_model(model)


def test_a_head_size_that_no_kernel_takes_is_refused():
    with pytest.raises(UnsupportedError, match="head_size is 12, expected a multiple of 8"):
        load_model(tiny_model("llama", head_dim=12))


@pytest.mark.parametrize("part", ["model.norm", "model.layers.1.self_attn.v_proj", ""])
def test_an_error_of_the_model_is_told_with_the_part_that_fails(part):
    model = tiny_model("llama")
    model.get_submodule(part).forward = lambda *args, **kwargs: [][1]
    kind = type(model.get_submodule(part)).__name__
    what = rf"its {part} \({kind}\)" if part else "its forward"
    with pytest.raises(
        UnsupportedError,
        match=rf"^LlamaForCausalLM cannot run on a paged cache: {what} failed when it was given "
        r"token ids .* no cache \(IndexError: list index out of range\)$",
    ):
        load_model(model)


def test_an_error_of_reading_a_models_layers_is_not_called_the_models(monkeypatch):
    monkeypatch.setattr(paged_model, "describe_layers", lambda *args: [][1])
    with pytest.raises(UnsupportedError, match="layers could not be read, which is a fault of pag"):
        load_model(tiny_model("llama"))


@pytest.mark.parametrize(("head_size", "runs"), [(16, True), (12, False)])
def test_loading_leaves_the_model_as_it_was(head_size, runs):
    model = tiny_model("llama", head_dim=head_size, pad_token_id=5)
    implementation = model.config._attn_implementation
    with nullcontext() if runs else pytest.raises(UnsupportedError):
        load_model(model)
    assert (model.config._attn_implementation, model.config.pad_token_id) == (implementation, 5)
    assert not any("pagetile_layer" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounding_alone_refuses_no_model(family, dtype, seed):
    load_model(tiny_model(family, seed, dtype))


def test_half_precision_hides_no_mistake(monkeypatch):
    break_attention(tiny_model("opt"), monkeypatch, scaling=None)
    with pytest.raises(UnsupportedError, match="logits differ"):
        load_model(tiny_model("opt", dtype=torch.bfloat16))


def test_the_registered_name_keeps_to_transformers_rules():
    name = attention_module.NAME
    assert not any(word in name for word in ("flash", "sdpa", "flex_attention", "/"))
    assert not name.startswith("paged|")


# How far positions reach.


def test_the_limit_is_the_configs_or_less():
    assert find_limit(tiny_config("llama"), None) == 256
    assert find_limit(tiny_config("llama"), 100) == 100
    assert find_limit(tiny_config("gpt2"), None) == 256


def test_more_positions_than_there_are_is_an_error():
    with pytest.raises(
        RequestError, match="max_model_len is 257, but this model has 256 positions"
    ):
        load_model(tiny_model("gpt2"), max_model_len=257)


@pytest.mark.parametrize("max_model_len", [3, 4, 6, 11])
def test_the_proof_fits_into_few_positions(max_model_len):
    model = tiny_model("gpt2", max_position_embeddings=max_model_len)
    assert load_model(model).max_model_len == max_model_len


def test_too_few_positions_to_prove_anything():
    with pytest.raises(RequestError, match="max_model_len is 2, expected at least 3"):
        load_model(tiny_model("gpt2"), max_model_len=2)


def longrope(original: int) -> dict:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": original,
        **factors,
    }


def test_frequencies_that_switch_for_all_are_kept_from_switching():
    config = {"rope_parameters": longrope(20), "original_max_position_embeddings": 20}
    assert load_model(tiny_model("phi3", **config)).max_model_len == 20
    assert load_model(tiny_model("phi3", **config), max_model_len=9).max_model_len == 9
    with pytest.raises(UnsupportedError, match="once a sequence passes position 20"):
        load_model(tiny_model("phi3", **config), max_model_len=21)


def test_dynamic_frequencies_run_up_to_where_they_grow():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    assert load_model(tiny_model("llama", rope_parameters=rope)).max_model_len == 256
