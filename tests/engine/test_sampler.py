import gc
import hashlib
import math

import numpy as np
import pytest
import torch
from host_sampling import SampledToken, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pagetile.engine import sampling_rows, torch_draw, torch_shape
from pagetile.engine.logprobs import (
    LogprobDicts,
    TokenLogprobs,
    TokenLogprobsList,
    compute_logprobs,
    read_logprobs,
)
from pagetile.engine.sampler import Sampler
from pagetile.engine.sampling_params import SamplingParams
from pagetile.engine.sampling_rows import BY_TORCH, Feature, SamplingInput
from pagetile.engine.sampling_tables import pack_bits
from pagetile.errors import DTypeError, GenerationError, NoTokenLeftError, ShapeError

GREEDY = SamplingParams(temperature=0.0)


def row(seed=0, index=0, prompt=(), output=(), forbidden=(), **options):
    if len(forbidden):  # as ends are that come too early
        options |= {"min_tokens": len(output) + 1, "max_tokens": None}
    return SamplingInput(SamplingParams(**options), prompt, output, seed, index, forbidden)


def shaped(logits, rows):
    """Logits with -inf where penalties, bans and cuts exclude a token."""
    one = Sampler(len(rows), logits.shape[1], logits.device)
    numbers = list(range(len(rows)))
    one.start(numbers, rows)
    lengths = [len(r.prompt_token_ids) + len(r.output_token_ids) for r in rows]
    return torch_shape.shape_logits(
        logits.float(), one.features, [one._tables[row] for row in numbers], torch.tensor(lengths),
        one.ints, one.floats,
    )  # fmt: skip


def mix(x, key=0):
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = ((x ^ (x >> 15)) + key) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def noise(input_, vocab_size):
    """The exponential noise of a row, in plain integers and float64."""
    key = hashlib.blake2b(f"{input_.seed:x},{input_.index}".encode(), digest_size=8).digest()
    position = len(input_.output_token_ids)
    first = mix((int.from_bytes(key[:4], "little") + position * 0x9E3779B9) % 2**32)
    second = (int.from_bytes(key[4:], "little") ^ first) + position * 0x85EBCA6B
    second = mix(second % 2**32)
    words = [mix((token + first) % 2**32, second) for token in range(vocab_size)]
    uniform = (np.array(words, np.float64) % 2**31 + 0.5) / 2**31
    return -np.log1p(-np.minimum(uniform, 1 - 2.0**-24))


def logits_of(num_rows, vocab_size, seed, scale=2.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * scale).to(dtype)


# --- an oracle that shares nothing with the sampler: float64, one row, plain loops -----------


def kept_probabilities(logits, row):
    """The distribution that one row is drawn from, computed step by step."""
    p = row.params
    x = [float(value) for value in logits]
    biases = dict(p.logit_bias)
    for token in range(len(x)):
        x[token] = float(np.float32(x[token]) + np.float32(biases.get(token, 0)))
        count = list(row.output_token_ids).count(token)
        if count or token in row.prompt_token_ids:
            x[token] = (
                x[token] / p.repetition_penalty
                if x[token] > 0
                else x[token] * (p.repetition_penalty)
            )
        x[token] -= p.presence_penalty * (count > 0) + p.frequency_penalty * count
        x[token] = float(np.float32(x[token]))
        if token in row.end_token_ids:
            x[token] = -math.inf
    if p.is_greedy:
        best = x.index(max(x))
        return np.array([float(token == best) for token in range(len(x))])
    weights = np.array([math.exp((value - max(x)) / p.temperature) for value in x])
    by_logit = sorted(range(len(x)), key=lambda token: -x[token])
    if p.top_k:
        edge = x[by_logit[min(p.top_k, len(x)) - 1]]
        weights[[token for token in by_logit if x[token] < edge]] = 0.0
    running = 0.0
    for token in by_logit:
        running += weights[token] / weights.sum()
        if running >= p.top_p - 1e-12:
            weights[[other for other in by_logit if x[other] < x[token]]] = 0.0
            break
    weights[weights < p.min_p] = 0.0
    return weights / weights.sum()


def random_row(rng, vocab_size):
    def pick(*options):
        return options[rng.integers(len(options))]

    return row(
        seed=int(rng.integers(-(2**60), 2**60)),
        index=int(rng.integers(4)),
        prompt=rng.integers(0, vocab_size + 3, rng.integers(6)).tolist(),
        output=rng.integers(0, vocab_size + 3, rng.integers(9)).tolist(),
        forbidden=rng.integers(0, vocab_size, pick(0, 0, 2)).tolist() if vocab_size > 2 else (),
        temperature=pick(0.0, 0.3, 1.0, 1.0, 2.5),
        top_k=int(pick(0, 0, 1, 2, 5, 50)),
        top_p=pick(1.0, 1.0, 0.1, 0.5, 0.9, 0.99),
        min_p=pick(0.0, 0.0, 0.02, 0.3, 1.0),
        presence_penalty=pick(0.0, 0.0, 0.5, -1.0, 2.0),
        frequency_penalty=pick(0.0, 0.0, 0.25, -0.5),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.7),
        logprobs=pick(None, 0, 1, 3, 100),
        logit_bias=dict(
            zip(
                rng.integers(0, vocab_size + 3, pick(0, 0, 4)).tolist(),
                rng.uniform(-5, 5, 4).tolist(),
                strict=False,
            )
        ),
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_the_one_that_a_naive_sampler_draws(seed):
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.integers(1, 60))
    logits = logits_of(25, vocab_size, seed, scale=float(rng.uniform(0.1, 5)))
    rows = [random_row(rng, vocab_size) for _ in logits]
    for one, input_, token in zip(logits, rows, sample(logits, rows), strict=True):
        with np.errstate(divide="ignore"):
            weights = np.log(kept_probabilities(one.tolist(), input_))
        # The logarithm of a weight is (x - x_max) / T and what the kept ones share.
        scores = weights - np.log(noise(input_, vocab_size))
        assert token.error is None
        assert scores.max() - scores[token.token_id] < 1e-4
        assert weights[token.token_id] > -math.inf


@pytest.mark.parametrize("varied", ["seed", "index", "position"])
def test_frequencies_follow_the_distribution(varied):
    num_draws, vocab_size = 4800, 9
    logits = logits_of(1, vocab_size, seed=3, scale=1.0)
    options = {"temperature": 0.8, "top_p": 0.95}
    rows = [
        row(
            seed=i if varied == "seed" else 11,
            index=i if varied == "index" else 0,
            output=range(i) if varied == "position" else (),
            **options,
        )
        for i in range(num_draws)
    ]
    drawn = [
        token.token_id
        for start in range(0, num_draws, 60)
        for token in sample(logits.expand(60, -1), rows[start : start + 60])
    ]
    expected = kept_probabilities(logits[0].tolist(), row(**options)) * num_draws
    counts = np.bincount(drawn, minlength=vocab_size)
    kept = expected > 0
    assert (counts[~kept] == 0).all()
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is close to normal.
    spread = 2 / (9 * freedom)
    assert abs((chi_square / freedom) ** (1 / 3) - (1 - spread)) < 3.3 * math.sqrt(spread)


def test_seed_index_position_and_token_give_unrelated_numbers():
    inputs = [
        row(seed=seed, index=index, output=range(position))
        for seed in range(-4, 4)
        for index in range(8)
        for position in range(8)
    ]
    ints = torch.tensor([sampling_rows.encode_row(i, Feature.RANDOM, 64)[0] for i in inputs])
    lengths = torch.tensor([len(i.output_token_ids) for i in inputs], dtype=torch.int32)
    ints = ints.to(torch.uint32).view(torch.int32)
    found = torch_draw.make_noise(torch.arange(64, dtype=torch.int32), ints, lengths).double()
    expected = torch.tensor(np.array([noise(i, 64) for i in inputs]))
    is_small = expected < 5  # float32 has few digits of the largest, which never win
    torch.testing.assert_close(found[is_small], expected[is_small], rtol=1e-5, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    uniform = found.neg().exp().view(8, 8, 8, 64)
    assert len(uniform.unique()) > 0.999 * uniform.numel()
    assert abs(uniform.mean() - 0.5) < 0.005
    assert abs(uniform.std() - 12**-0.5) < 0.005
    for axis in range(4):
        first, second = (uniform.narrow(axis, at, uniform.shape[axis] - 1) for at in (0, 1))
        pairs = torch.stack([first.flatten(), second.flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 0.02


@pytest.mark.parametrize("word", [0, -1, 0x7FFFFFFF, -(2**31)])
def test_noise_is_finite_and_positive_at_both_ends(word, monkeypatch):
    monkeypatch.setattr(torch_draw, "_mix", lambda x, key=0: torch.full_like(x, word))
    ints, zero = torch.zeros(1, 6, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    found = torch_draw.make_noise(torch.arange(3, dtype=torch.int32), ints, zero)
    assert (found > 0).all()
    assert found.isfinite().all()


# --- peers ---------------------------------------------------------------------------------


def kept_set(logits, **options):
    """Every token that can be drawn."""
    return set(shaped(logits, [row(**options)])[0].isfinite().nonzero()[:, 0].tolist())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3},
        {"top_k": 50},
        {"top_p": 0.05},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.2},
    ],
    ids=str,
)
def test_kept_tokens_are_those_of_transformers(options, seed):
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.rand(1, 16, generator=torch.Generator().manual_seed(seed)) * 4
    warped = logits / 1.5
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in options:
            warped = warper(options[name])(None, warped)
    expected = set(warped[0].isfinite().nonzero()[:, 0].tolist())
    assert kept_set(logits, temperature=1.5, **options) == expected


@pytest.mark.parametrize("penalty", [1.2, 0.6])
def test_repetition_penalty_is_that_of_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits_of(20, 30, seed=1)
    prompts, outputs = torch.randint(30, (2, 20, 5)).tolist()
    rows = [
        row(prompt=p, output=o, repetition_penalty=penalty)
        for p, o in zip(prompts, outputs, strict=True)
    ]
    context = torch.cat([torch.tensor(prompts), torch.tensor(outputs)], dim=1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(context, logits.clone())
    torch.testing.assert_close(shaped(logits, rows), expected, rtol=1e-6, atol=0)


# --- a row is alone ------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_gives_the_same_bits_in_any_company(vocab_size, dtype):
    rng = np.random.default_rng(vocab_size)
    num_rows = 17
    logits = logits_of(num_rows, vocab_size, seed=5, dtype=dtype)
    rows = [random_row(rng, vocab_size) for _ in range(num_rows)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(num_rows)]
    assert alone == together
    order = rng.permutation(num_rows).tolist()
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    spoilt = torch.cat([torch.full_like(logits[:3], math.nan), logits])
    assert sample(spoilt, rows[:3] + rows)[3:] == together
    padded = torch.nn.functional.pad(logits, (1, 2), value=math.nan)
    assert sample(padded[:, 1:-2], rows) == together


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_chooses_the_same_tokens_and_is_as_steady(dtype):
    rng = np.random.default_rng(0)
    logits = logits_of(40, 5001, seed=8, dtype=dtype)
    logits[7] = math.nan
    rows = [random_row(rng, 5001) for _ in range(40)]
    tokens = sample(logits.cuda(), rows)
    assert [sample(logits[i : i + 1].cuda(), rows[i : i + 1])[0] for i in range(40)] == tokens
    for token, expected in zip(tokens, sample(logits, rows), strict=True):
        assert (token.token_id, token.error) == (expected.token_id, expected.error)
        if expected.logprobs is not None:
            found, wanted = token.logprobs, expected.logprobs
            assert found[2:4] == wanted[2:4]  # rank, and ids of the best
            assert found.logprob == pytest.approx(wanted.logprob, rel=1e-6)
            assert found.top_logprobs == pytest.approx(wanted.top_logprobs, rel=1e-6)


def test_threads_do_not_change_the_bits():
    logits = logits_of(3, 50_000, seed=2)
    rows = [row(seed=i, top_p=0.9, logprobs=3) for i in range(3)]
    several = sample(logits, rows)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert sample(logits, rows) == several
    finally:
        torch.set_num_threads(num_threads)


def test_sampling_has_no_state():
    logits, rows = logits_of(4, 100, seed=0), [row(seed=i) for i in range(4)]
    state = torch.get_rng_state()
    first = sample(logits, rows)
    assert torch.equal(torch.get_rng_state(), state)
    assert sample(logits, rows) == first


def test_samples_of_one_request_differ():
    logits = logits_of(1, 1000, seed=0).expand(8, -1)
    assert len({token.token_id for token in sample(logits, [row(index=i) for i in range(8)])}) > 4


@pytest.mark.parametrize("seed", [-(2**300), -1, 2**64, 10**5000], ids=["a", "b", "c", "d"])
def test_any_integer_is_a_seed(seed):
    token_ids = [
        sample(logits_of(1, 1000, seed=0), [row(seed=seed + i)])[0].token_id for i in range(4)
    ]
    assert len(set(token_ids)) > 1


def test_inputs_are_not_written_to():
    logits = logits_of(3, 50, seed=1)
    before = logits.clone()
    sample(logits, [row(output=[1, 2], presence_penalty=1.0, forbidden=[3], top_p=0.5)] * 3)
    assert torch.equal(logits, before)


# --- greedy, ties, forbidden tokens ----------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_greedy_takes_the_lowest_id_among_equals(dtype):
    logits = torch.zeros(5, 5000, dtype=dtype)
    for i, first in enumerate((0, 17, 2048, 4095, 4999)):
        logits[i, first:] = 1.0
    assert [t.token_id for t in sample(logits, [row(temperature=0.0)] * 5)] == [
        0, 17, 2048, 4095, 4999,
    ]  # fmt: skip


def test_top_k_one_is_greedy_among_equals_too():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]]).expand(20, -1)
    rows = [row(seed=i, top_k=1) for i in range(20)]
    assert {token.token_id for token in sample(logits, rows)} == {1}


def test_tokens_tied_with_the_last_kept_one_stay():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, -0.0, 0.0]])
    assert kept_set(logits, top_k=2) == {0, 2, 3, 4}
    assert kept_set(logits, top_p=0.7) == {0, 2, 3, 4}
    assert kept_set(logits, top_k=6) == {0, 1, 2, 3, 4, 5, 6}


def test_tiny_temperature_top_p_or_full_min_p_leave_the_best_token():
    logits = logits_of(50, 300, seed=4)
    best = logits.argmax(dim=1).tolist()
    for options in ({"temperature": 1e-300}, {"top_p": 1e-300}, {"min_p": 1.0}, {"top_k": 1}):
        rows = [row(seed=i, **options) for i in range(50)]
        assert [token.token_id for token in sample(logits, rows)] == best


def test_huge_temperature_is_uniform_over_what_is_possible():
    logits = torch.tensor([[30.0, -80.0, -math.inf, 1.0]]).expand(600, -1)
    tokens = sample(logits, [row(seed=i, temperature=1e300) for i in range(600)])
    counts = np.bincount([token.token_id for token in tokens], minlength=4)
    assert counts[2] == 0
    assert counts[[0, 1, 3]].min() > 150


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=40), st.data(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_forbidden_token_is_never_chosen(values, data, greedy):
    forbidden = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=len(values) - 1))
    logits = torch.tensor([values])
    input_ = row(forbidden=forbidden, temperature=0.0 if greedy else 3.0, seed=len(forbidden))
    assert sample(logits, [input_])[0].token_id not in forbidden


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_chosen(temperature):
    logits = logits_of(40, 100, seed=2)
    allowed = [3, 31, 32, 64, 99, 10**6]
    rows = [row(seed=i, temperature=temperature, allowed_token_ids=allowed) for i in range(40)]
    rows[0] = row(temperature=temperature)
    found = sample(logits, rows)
    assert found[0] == sample(logits[:1], rows[:1])[0]
    assert {token.token_id for token in found[1:]} <= {*allowed}
    best = logits[:, allowed[:-1]].argmax(dim=1)
    if not temperature:
        assert [t.token_id for t in found[1:]] == [allowed[i] for i in best[1:]]


def test_a_mask_of_bits_rules_tokens_out_for_one_step():
    logits, vocab_size = logits_of(3, 70, seed=2), 70
    one = Sampler(3, vocab_size, logits.device)
    one.start([0, 1, 2], [row(seed=i) for i in range(3)])
    mask = pack_bits(np.isin(np.arange(vocab_size), [5, 68]))
    rows = torch.arange(3)
    masked = one.sample(logits, rows, [0, 1, 2], [(1, mask)])[0].tolist()
    assert masked[1] in (5, 68)
    again = Sampler(3, vocab_size, logits.device)
    again.start([0, 1, 2], [row(seed=i) for i in range(3)])
    free = again.sample(logits, rows, [0, 1, 2])[0].tolist()
    assert [masked[0], masked[2]] == [free[0], free[2]]


def test_an_end_may_come_after_min_tokens_and_no_earlier():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=None)
    ends = [
        sample(logits, [SamplingInput(params, (2, 2), output, 0, 0, (1,))])[0].token_id
        for output in ((), (2,), (2, 2), (2, 2, 2))
    ]
    assert ends == [2, 2, 1, 1]


@pytest.mark.parametrize("min_tokens", [2**31 - 1, 2**31, 2**32, 10**20])
def test_an_end_never_comes_before_any_number_of_min_tokens(min_tokens):
    params = SamplingParams(temperature=0.0, min_tokens=min_tokens, max_tokens=None)
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    row = SamplingInput(params, (2, 2), (2,) * 5, 0, 0, (1,))
    assert sample(logits, [row])[0].token_id == 2


def test_rows_that_ask_for_different_numbers_of_logprobs_get_them():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([3, 1, 4, 1, 5])
    packed, wanted = compute_logprobs(logits, tokens, 250), [2, None, 250, 0, 2]
    together = read_logprobs(packed, tokens.tolist(), wanted)
    for i, (count, report) in enumerate(zip(wanted, together, strict=True)):
        if count is None:
            assert report is None
            continue
        [alone] = read_logprobs(packed[i : i + 1], [int(tokens[i])], [count])
        assert report == alone
        best = torch.log_softmax(logits[i], -1).topk(count)
        assert report.top_ids == best.indices.tolist()
        torch.testing.assert_close(report.top_logprobs, best.values.tolist())


def test_a_bad_word_is_ruled_out_where_it_would_be_complete():
    logits = torch.zeros(1, 10)
    logits[0, 7], logits[0, 4] = 2.0, 1.0
    params = SamplingParams(temperature=0.0, bad_words=["x"])

    def next_token(output, bad_words):
        return sample(logits, [SamplingInput(params, (), output, 0, 0, (), bad_words)])[0].token_id

    assert next_token([3, 5], [(5, 7)]) == 4
    assert next_token([5, 3], [(5, 7)]) == 7
    assert next_token([], [(5, 7)]) == 7
    assert next_token([], [(7,)]) == 4
    assert next_token([3, 5], [(2, 5, 7)]) == 7
    assert next_token([2, 5], [(2, 5, 7), (4,)]) == 0
    assert next_token([2, 6], [(2, 5, 7)]) == 7


def test_counts_and_tails_follow_what_is_drawn():
    """A row that samples step by step gets the tokens of rows that are loaded anew each time."""
    logits = logits_of(30, 12, seed=4, scale=1.0)
    options = {"presence_penalty": 1.0, "repetition_penalty": 1.3, "bad_words": ["x"]}
    params, bad = SamplingParams(**options), ((3, 4), (1, 2, 5), (9,))
    one = Sampler(1, 12, logits.device)
    one.start([0], [SamplingInput(params, (0, 1), (), 8, 0, (), bad)])
    one.lengths[0] = 2
    found, expected = [], []
    for step in logits:
        found += one.sample(step[None], torch.zeros(1, dtype=torch.int64), [0]).tokens.tolist()
        input_ = SamplingInput(params, (0, 1), tuple(expected), 8, 0, (), bad)
        expected.append(sample(step[None], [input_])[0].token_id)
    assert found == expected
    assert len({*found}) > 5


def test_ids_outside_the_vocabulary_are_ignored():
    logits = logits_of(2, 10, seed=0)
    stray = row(prompt=[10, -1, 999], output=[10**9], forbidden=[10, -1], repetition_penalty=1.5)
    both = [stray, row(output=[0])]
    assert sample(logits, both) == sample(logits, [row(output=[0]), row(output=[0])])


# --- log-probabilities -----------------------------------------------------------------------


def test_logprobs_are_those_of_the_unmodified_logits():
    logits = logits_of(6, 500, seed=9)
    options = {"temperature": 0.5, "top_k": 20, "presence_penalty": 1.0, "logprobs": 4}
    tokens = sample(logits, [row(seed=i, output=[1, 2], **options) for i in range(6)])
    expected = logits.double().log_softmax(dim=1)
    for token, logprobs in zip(tokens, expected, strict=True):
        found, best = token.logprobs, logprobs.topk(4)
        assert found.logprob == pytest.approx(logprobs[token.token_id].item(), rel=1e-6)
        assert found.top_ids == best.indices.tolist()
        assert found.top_logprobs == pytest.approx(best.values.tolist(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 5001])
def test_logprobs_are_those_of_float64_but_for_the_rounding_of_float32(vocab_size, dtype):
    logits = logits_of(9, vocab_size, seed=vocab_size, scale=4.0, dtype=dtype)
    num_top = min(vocab_size, 20)
    tokens = torch.arange(9) * 37 % vocab_size
    exact = logits.double().log_softmax(dim=1)
    packed = compute_logprobs(logits, tokens, num_top)
    # Each exponential is off by an ulp of its argument's rounding, which is at most an ulp of the
    # largest argument that counts, 32; the result is rounded once more.
    ulp = torch.finfo(torch.float32).eps
    reports = read_logprobs(packed, tokens.tolist(), [num_top] * 9)
    for logprobs, found in zip(exact, reports, strict=True):
        token = found.token_id
        assert found.rank == int((logprobs >= logprobs[token]).sum())
        order = sorted(range(vocab_size), key=lambda i: (-logprobs[i].item(), i))
        assert found.top_ids == order[:num_top]
        wanted = torch.tensor([logprobs[i] for i in (token, *order[:num_top])])
        error = (torch.tensor([found.logprob, *found.top_logprobs]) - wanted).abs()
        assert bool((error <= ulp * (16 + wanted.abs())).all())


def test_top_logprobs_put_the_lowest_id_first_among_equals():
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, -0.0]])
    wanted = sample(logits, [row(logprobs=4, temperature=0.0)])[0].logprobs
    assert wanted.top_ids == [1, 3, 0, 2]


def test_a_list_of_logprobs_gives_back_what_was_added():
    rng = np.random.default_rng(0)
    tokens, expected = TokenLogprobsList(), []
    for num_top in (0, 3, 0, 1, 20, 2):
        ids, logprobs = rng.integers(0, 2**31, num_top).tolist(), rng.normal(size=num_top).tolist()
        expected.append(TokenLogprobs(num_top + 5, -math.inf, num_top + 1, ids, logprobs))
        tokens.append(expected[-1])
    assert [*tokens] == tokens[:] == expected == tokens
    assert tokens != expected[1:]
    assert tokens[-1] == expected[-1]
    assert tokens[1:5:2] == expected[1:5:2]
    with pytest.raises(IndexError):
        tokens[6]
    before = tokens.copy()
    tokens.append(expected[0])
    assert (len(before), len(tokens)) == (6, 7)
    assert LogprobDicts(tokens)[1:3] == LogprobDicts(expected)[1:3]


def test_kept_logprobs_are_nothing_for_the_garbage_collector():
    tokens = TokenLogprobsList()
    gc.collect()
    before = len(gc.get_objects())
    for i in range(1000):
        tokens.append(TokenLogprobs(i, -1.0, 1, [i], [-1.0]))
    assert len(gc.get_objects()) < before + 100


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    logits = logits_of(4, 3, seed=0)
    tokens = sample(logits, [row(logprobs=asked) for asked in (None, 0, 2, 99)])
    assert [len(token.logprobs.top_ids) for token in tokens[1:]] == [0, 2, 3]
    assert [token.logprobs is None for token in tokens] == [True, False, False, False]


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("where", [5, slice(None)], ids=["one", "all"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1, "logprobs": 2}],
    ids=str,
)
def test_a_broken_row_fails_alone(bad, where, options):
    logits = logits_of(3, 8, seed=0)
    good = sample(logits, [row(seed=i, **options) for i in range(3)])
    logits[1, where] = bad
    rows = [row(seed=i, forbidden=[5] if i == 1 else (), **options) for i in range(3)]
    tokens = sample(logits, rows)
    assert [tokens[0], tokens[2]] == [good[0], good[2]]
    assert tokens[1].token_id == 0
    assert tokens[1].logprobs is None
    assert "the largest logit is" in (tokens[1].error or "")


def test_a_row_with_every_token_forbidden_says_so():
    token = sample(logits_of(1, 3, seed=0), [row(forbidden=[0, 1, 2])])[0]
    assert "every token is forbidden" in (token.error or "")


@pytest.mark.parametrize(
    ("bad", "options", "expected"),
    [
        (-math.inf, {"allowed_token_ids": [1]}, NoTokenLeftError),
        (math.inf, {"repetition_penalty": 2.0}, NoTokenLeftError),
        (-math.inf, {}, GenerationError),
        (math.inf, {}, GenerationError),
        (math.nan, {"allowed_token_ids": [1], "repetition_penalty": 2.0}, GenerationError),
    ],
)
def test_an_error_tells_whether_the_request_or_the_model_is_to_blame(bad, options, expected):
    [token] = sample(torch.full((1, 3), bad), [row(**options)])
    assert token.error_type is expected


def test_wrong_shapes_and_types_are_refused():
    with pytest.raises(ShapeError, match="num_rows=2 but rows has 1"):
        sample(torch.zeros(2, 3), [row()])
    with pytest.raises(ShapeError, match="1 dimension "):
        sample(torch.zeros(3), [row()])
    with pytest.raises(DTypeError, match="int64"):
        sample(torch.zeros(1, 3, dtype=torch.int64), [row()])


def test_an_empty_batch_is_an_empty_list():
    assert sample(torch.zeros(0, 5), []) == []


# --- cost ------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Names of the torch operations that run inside."""

    def __enter__(self):
        self.names = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_rows_run_only_the_operations_that_they_ask_for():
    logits = logits_of(4, 50, seed=0)
    with Operations() as greedy:
        sample(logits, [row(temperature=0.0)] * 4)
    assert not {"exp_", "log1p_", "sort", "topk", "scatter_add_", "cumsum"} & {*greedy.names}
    with Operations() as drawn:
        sample(logits, [row(temperature=0.0), row(), row(), row()])
    assert "log1p_" in drawn.names
    assert not {"exp_", "sort", "topk", "scatter_add_", "cumsum"} & {*drawn.names}


def test_an_edge_is_searched_only_in_rows_that_have_one(monkeypatch):
    searched = []
    search = torch_shape._is_kept

    def counted(logits, amounts, need):
        searched.append(len(logits))
        return search(logits, amounts, need)

    monkeypatch.setattr(torch_shape, "_is_kept", counted)
    sample(logits_of(5, 50, seed=0), [row(), row(top_k=3), row(temperature=0.0), row(), row()])
    assert searched == [1]


@pytest.mark.parametrize(
    ("options", "bad_words", "expected"),
    [
        ({"top_k": 3, "top_p": 0.5, "presence_penalty": 1.0, "logprobs": 20}, (), False),
        ({"bad_words": ["x"]}, ((4,),), False),
        ({"bad_words": ["x"]}, ((4, 5),), True),
        ({"logprobs": 21}, (), True),
    ],
)
def test_rows_are_sampled_within_a_graph_but_for_long_bad_words_and_many_logprobs(
    options, bad_words, expected
):
    one = Sampler(2, 30, torch.device("cpu"))
    one.start([1], [SamplingInput(SamplingParams(**options), (), (), 0, 0, (), bad_words)])
    assert one.uses([0, 1], BY_TORCH) is expected
    assert not one.uses([0], BY_TORCH)
    assert one.uses([1], Feature.LOGPROBS) is ("logprobs" in options)


def test_greedy_tokens_carry_nothing_that_was_not_asked():
    assert sample(torch.tensor([[0.0, 1.0]]), [SamplingInput(GREEDY, (), (), 0, 0)]) == [
        SampledToken(1)
    ]
