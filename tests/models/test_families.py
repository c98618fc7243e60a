"""Families that compute attention in their own modules: exact, or refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from tiny_models import ADAPTED, EXPERTS, tiny_config, tiny_model

from pagetile import LLM, RequestError, SamplingParams, UnsupportedError
from pagetile.kv_cache import BlockPool
from pagetile.kv_cache.storage import KVCache
from pagetile.models import ForwardBatch, load_model
from pagetile.models.attention import NAME, collect_configs, driven
from pagetile.models.module_attention.bias import append_bias, fit_bias
from pagetile.ops.paged_attention import PagedBatch
from pagetile.tiles.eager import attend

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = {"max_position_embeddings": 512, "max_seq_len": 512, "window_size": 300}
"""Far enough for bfloat16 to round positions, and for a window that no short proof reaches."""


def own_logits(model, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=token_ids[None], use_cache=False).logits[0]


def paged_logits(model, token_ids: torch.Tensor, chunk: int = 150) -> torch.Tensor:
    """Logits of one sequence, chunk by chunk."""
    paged = load_model(model)
    num_blocks = -(-len(token_ids) // 16)
    cache = KVCache(paged.layers, BlockPool(num_blocks, 16), dtype=paged.dtype)
    paged.bind(cache)
    tables = torch.arange(num_blocks, dtype=torch.int32).flip(0)[None].contiguous()
    logits = []
    for start in range(0, len(token_ids), chunk):
        positions = torch.arange(start, min(start + chunk, len(token_ids)))
        end = start + len(positions)
        batch = PagedBatch(
            tables,
            torch.tensor([end], dtype=torch.int32),
            torch.tensor([0, len(positions)], dtype=torch.int32),
            len(positions),
            end,
        )
        slots = tables[0, positions // 16].long() * 16 + positions % 16
        step = ForwardBatch(token_ids[positions], positions, batch, slots, positions - start)
        logits.append(paged.forward(step))
    return torch.cat(logits)


def assert_exact(model, num_tokens: int = 40) -> None:
    token_ids = torch.arange(num_tokens) * 31 % 90 + 3
    torch.testing.assert_close(
        paged_logits(model, token_ids), own_logits(model, token_ids), rtol=1e-4, atol=2e-4
    )


@pytest.mark.parametrize("family", ADAPTED)
def test_logits_of_long_sequences_are_the_models_own(family):
    assert_exact(tiny_model(family, **LONG), num_tokens=420)


@pytest.mark.parametrize("family", ADAPTED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_alone_refuses_no_family(family, dtype):
    for seed in range(2):
        load_model(tiny_model(family, seed, dtype))


@pytest.mark.parametrize("family", ADAPTED)
def test_the_model_generates_by_itself_before_and_after(family):
    model = tiny_model(family)
    prompt = torch.arange(3, 14)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    before = model.generate(prompt, **options).tolist()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    llm = LLM(model, num_blocks=16)
    output = llm.generate([prompt[0].tolist()], GREEDY, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == before[0][11:]
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.generate(prompt, **options).tolist() == before


# The parts of a model's attention are read from the model.


def change_slopes(monkeypatch, change) -> None:
    """Let BLOOM's slopes be others, in any release of Transformers."""
    from transformers.models.bloom import modeling_bloom

    for name in ("_get_alibi_slopes", "build_alibi_tensor"):
        own = getattr(modeling_bloom, name, None)
        if own is not None:
            monkeypatch.setattr(
                modeling_bloom, name, lambda *args, own=own, **named: change(own(*args, **named))
            )
            return


def test_doubled_slopes_are_followed(monkeypatch):
    token_ids = torch.arange(3, 43)
    usual = own_logits(tiny_model("bloom"), token_ids)
    change_slopes(monkeypatch, lambda slopes: 2 * slopes)
    assert (own_logits(tiny_model("bloom"), token_ids) - usual).abs().max() > 0.1
    assert_exact(tiny_model("bloom"))


@pytest.mark.parametrize("num_heads", [4, 6, 12])
@pytest.mark.parametrize("bias_max", [4, 8])
def test_slopes_of_mpt_are_its_own(num_heads, bias_max):
    attention = {"alibi_bias_max": bias_max}
    assert_exact(tiny_model("mpt", num_attention_heads=num_heads, attn_config=attention))


@pytest.mark.parametrize("family", ["falcon_alibi", "falcon_alibi_multi_query"])
def test_falcon_counts_its_bias_as_often_as_it_is_set_to(family):
    token_ids = torch.arange(3, 43)
    model = tiny_model(family)
    assert model.config._attn_implementation == "sdpa"
    once = own_logits(model, token_ids)
    model.config._attn_implementation_internal = "eager"  # which adds it to the mask as well
    assert (own_logits(model, token_ids) - once).abs().max() > 0.1
    assert_exact(model)


def test_the_scale_of_gptj_is_its_own():
    model = tiny_model("gptj")
    for layer in model.transformer.h:
        layer.attn.scale_attn = 3.0
    assert_exact(model)


@pytest.mark.parametrize("rotary_dim", [None, 16, 4])
def test_gptj_rotates_as_much_as_it_says(rotary_dim):
    model = tiny_model("gptj", rotary_dim=rotary_dim or 16)
    assert_exact(model)


# Models that differ from their family are refused.


def attention_modules(model) -> list:
    names = {"BloomAttention", "MptAttention", "FalconAttention", "GPTJAttention"}
    names |= {"GPTNeoSelfAttention"}
    return [module for module in model.modules() if type(module).__name__ in names]


@pytest.mark.parametrize("family", ADAPTED)
def test_a_subclass_with_a_forward_of_its_own_is_refused(family):
    model = tiny_model(family)
    module = attention_modules(model)[1]
    own = type(module)

    class Louder(own):
        def forward(self, *arguments, **options):
            out, *rest = super().forward(*arguments, **options)
            return 1.1 * out, *rest

    module.__class__ = Louder
    with pytest.raises(UnsupportedError, match="only 2 of its 3 layers call"):
        load_model(model)


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon_alibi"])
def test_another_bias_in_one_layer_is_refused(family):
    model = tiny_model(family)
    name = "position_bias" if family == "mpt" else "alibi"
    bias = "attention_mask" if family == "falcon_alibi" else name  # where sdpa has it

    def double(module, arguments, options):
        return arguments, {**options, bias: 2 * options[bias]}

    attention_modules(model)[2].register_forward_pre_hook(double, with_kwargs=True)
    with pytest.raises(UnsupportedError, match=r"layer 'transformer.*2.*' does not compute what"):
        load_model(model)


@pytest.mark.parametrize("family", ["gptj", "gpt_neo"])
def test_weights_that_the_attention_changes_are_refused(family):
    model = tiny_model(family)
    module = attention_modules(model)[0]
    own = module._attn
    module._attn = lambda *args, **options: tuple(1.1 * part for part in own(*args, **options))
    with pytest.raises(UnsupportedError, match="only 2 of its 3 layers call"):
        load_model(model)


def test_a_bias_that_changes_far_beyond_the_proof_is_refused(monkeypatch):
    from transformers.models.mpt import modeling_mpt

    own = modeling_mpt.build_mpt_alibi_tensor

    def bent(*arguments, **options):
        bias = own(*arguments, **options)
        far = bias[..., :1] + 0 * bias
        far[..., 400:] = bias[..., 400:]
        return far

    monkeypatch.setattr(modeling_mpt, "build_mpt_alibi_tensor", bent)
    with pytest.raises(UnsupportedError, match="is not linear in the key's position"):
        load_model(tiny_model("mpt", **LONG))


def test_a_window_that_changes_far_beyond_the_proof_is_refused():
    model = tiny_model("gpt_neo", **{**LONG, "window_size": 7})
    module = attention_modules(model)[0]
    module.bias[..., 450:500, 440:] |= torch.ones(50, 72, dtype=torch.bool).tril(10)
    with pytest.raises(UnsupportedError, match="is not that of a window of 7 keys"):
        load_model(model)


def test_blooms_sliced_projection_without_its_bias_is_refused():
    model = tiny_model("bloom", pretraining_tp=2, slow_but_exact=True)
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.0
    with pytest.raises(UnsupportedError, match="does not compute what BloomAttention"):
        load_model(model)


def test_mpt_runs_as_far_as_its_bias_reaches():
    assert load_model(tiny_model("mpt")).max_model_len == 256
    with pytest.raises(RequestError, match="max_model_len is 257, but this model has 256"):
        load_model(tiny_model("mpt"), max_model_len=257)


def test_a_rounded_bias_needs_more_than_8_bits():
    llm = LLM(tiny_model("falcon_alibi"), num_blocks=16, kv_cache_dtype="int8")
    with pytest.raises(UnsupportedError, match="needs keys of 16 bits or more"):
        llm.generate([[3, 4, 5]], GREEDY, use_tqdm=False)


def test_a_driven_model_builds_no_mask():
    """A mask for the packed rows would hide cached keys, or show keys of other sequences."""
    for family in ("bloom", "falcon", "gptj", "gpt_neo"):
        model, seen = tiny_model(family), []
        hook = attention_modules(model)[0].register_forward_pre_hook(
            lambda module, args, options, seen=seen: seen.append(options["attention_mask"]),
            with_kwargs=True,
        )
        # Falcon's own attention fails on a mask that is not there.
        with suppress(TypeError), driven(collect_configs(model), NAME):
            own_logits(model, torch.arange(5))
        hook.remove()
        assert seen == [None], family


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*ADAPTED, *EXPERTS])
def test_a_decode_step_is_recorded(family, dtype):
    """One graph, replayed with other tokens, gives the logits of the step run eagerly."""
    paged = load_model(tiny_model(family, dtype=dtype), device="cuda")
    cache = KVCache(paged.layers, BlockPool(8, 16), dtype=dtype, device="cuda")
    for blocks in (*cache.k, *cache.v):
        blocks.normal_()
    paged.bind(cache)
    tables = torch.arange(8, dtype=torch.int32, device="cuda").view(4, 2)
    lengths = torch.full((4,), 20, dtype=torch.int32, device="cuda")
    positions = torch.full((4,), 19, device="cuda")
    step = ForwardBatch(
        token_ids=torch.tensor([5, 6, 7, 8], device="cuda"),
        positions=positions,
        batch=PagedBatch.decode(tables, lengths, max_seq_len=32),
        slot_mapping=tables[:, 1].long() * 16 + 3,
        logits_rows=torch.arange(4, device="cuda"),
    )
    paged.forward(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = paged.forward(step)
    step.token_ids.copy_(torch.tensor([50, 40, 30, 20], device="cuda"))
    graph.replay()
    replayed = logits.clone()
    assert torch.equal(replayed, paged.forward(step))


# The bias by itself.


@pytest.mark.parametrize("shift", [0, -40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
def test_slopes_are_found(shift, dtype, tolerance):
    slopes = torch.tensor([0.7071, 0.3, 0.0021])
    bias = (slopes[:, None] * (torch.arange(2048) + shift)).to(dtype)
    fitted = fit_bias(bias)
    assert fitted.is_linear
    torch.testing.assert_close(fitted.slopes, slopes, rtol=tolerance, atol=0)


def test_a_product_rounded_to_bfloat16_is_told_from_a_slope():
    slopes = torch.tensor([0.5, 0.7071]).bfloat16()
    rounded = fit_bias((slopes[:, None] * torch.arange(512)).float())
    assert not rounded.is_linear
    positions = torch.tensor([3, 300, 511])
    assert torch.equal(rounded.at(positions), slopes[:, None] * positions)
    assert fit_bias((slopes[:1, None] * torch.arange(256)).float()).is_linear


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (12, 1)])
def test_appended_columns_add_the_bias(num_heads, num_kv_heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, 9, 8, generator=generator)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    slopes = torch.rand(num_heads, generator=generator)
    wide_q, wide_k = append_bias(q, k, slopes[:, None] * torch.arange(9))
    assert wide_q.shape[3] % 8 == wide_k.shape[3] % 8 == 0

    def run(q, k, **options):
        parts = (part[0].transpose(0, 1) for part in (q, k, v))
        return attend(*parts, softmax_scale=0.5, causal=True, **options)[0]

    torch.testing.assert_close(
        run(wide_q, wide_k), run(q, k, alibi_slopes=0.5 * slopes), rtol=1e-5, atol=1e-5
    )


def test_families_are_told_by_their_config_alone():
    from pagetile.models.support import check_config

    for family in ADAPTED:
        check_config(tiny_config(family))
