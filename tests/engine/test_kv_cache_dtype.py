"""An engine with an 8-bit cache: what it stores, and that sharing changes nothing."""

import pytest
import torch

from pagetile import LLM, RequestError, SamplingParams

PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item"
HALF_STEPS = {"int8": 1 / 254, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3}  # of the largest number
# A kernel takes 10 seconds to compile: those of the others wait until slow tests are asked for.
NAMES = [
    "int8",
    *(pytest.param(f"fp8_{name}", marks=pytest.mark.slow) for name in ("e4m3", "e5m2")),
]


def make(kv_cache_dtype, **options):
    options = {"num_blocks": 64, "max_num_seqs": 8, **options}
    return LLM(dtype="float32", kv_cache_dtype=kv_cache_dtype, **options)


def first_layer(llm):
    """Keys of the first layer in full, ``[num_slots, num_kv_heads, head_size]``."""
    cache = llm.engine.cache
    keys = cache.k[0].float()
    if cache.k_scale[0] is not None:
        keys = keys * cache.k_scale[0][..., None]
    return keys.flatten(0, 1)


def first_logprobs(llm):
    """Log-probabilities of the five best tokens after the prompt, whose keys are cached then."""
    [output] = llm.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=5), use_tqdm=False)
    return len(output.prompt_token_ids), dict(output.outputs[0].logprobs.tokens[0].top())


def largest_error(logprobs, expected):
    common = logprobs.keys() & expected.keys()
    assert len(common) >= 3
    return max(abs(logprobs[token] - expected[token]) for token in common)


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_holds_the_models_keys_rounded(name):
    small, exact, bf16 = make(name), make("auto"), make("bfloat16")
    num_tokens, logprobs = first_logprobs(small)
    _, expected = first_logprobs(exact)
    keys, wanted = (first_layer(llm)[:num_tokens] for llm in (small, exact))
    errors = (keys - wanted).abs() / wanted.abs().amax(dim=-1, keepdim=True)
    assert 0 < errors.max() <= 1.001 * HALF_STEPS[name]
    # Errors of results grow as those of keys and values do.
    bf16_error = largest_error(first_logprobs(bf16)[1], expected)
    assert largest_error(logprobs, expected) < 4 * bf16_error * HALF_STEPS[name] / 2**-9


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_gets_the_same_tokens_in_any_company(name):
    """Samples fork from a shared block, which is copied with its scales."""
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=12, n=3)
    llm = make(name)
    [together] = llm.generate([PROMPT], params, use_tqdm=False)
    again = llm.generate([PROMPT, "import os\n", PROMPT], params, use_tqdm=False)[-1]
    assert again.num_cached_tokens > 0
    small = make(name, num_blocks=16, max_num_batched_tokens=8, enable_prefix_caching=False)
    [chunked] = small.generate([PROMPT], params, use_tqdm=False)
    for other in (again, chunked):
        assert [o.token_ids for o in other.outputs] == [o.token_ids for o in together.outputs]


def test_types_may_be_torch_types_and_others_are_refused():
    assert make(torch.int8).engine.cache.dtype == torch.int8
    assert make("fp8").engine.cache.dtype == torch.float8_e4m3fn  # as vLLM spells it
    with pytest.raises(
        RequestError, match=r"kv_cache_dtype='fp4': expected 'auto', 'float32', .*int8"
    ):
        make("fp4")


@pytest.mark.gpu
@pytest.mark.parametrize("name", HALF_STEPS)
def test_graphs_of_decode_steps_change_nothing(name):
    params, found = SamplingParams(temperature=0, max_tokens=12), []
    for enforce_eager in (False, True):
        llm = make(name, device="cuda", enforce_eager=enforce_eager)
        outputs = llm.generate([PROMPT, PROMPT[:30]], params, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
