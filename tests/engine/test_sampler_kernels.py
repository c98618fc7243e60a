"""The sampling kernels choose the same tokens as the torch code."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels to interpret")

import triton
import triton.language as tl

from pagetile.engine import triton_draw
from pagetile.engine.logprobs import add_logprobs, compute_logprobs, read_logprobs
from pagetile.engine.sampler import Sampler
from pagetile.engine.sampling_params import SamplingParams
from pagetile.engine.sampling_rows import MAX_TOP, Feature, SamplingInput
from pagetile.engine.sampling_tables import pack_bits
from pagetile.engine.triton_cut import find_edge
from pagetile.engine.triton_draw import draw, unpack
from pagetile.engine.triton_rows import from_order, noise_of, position_of
from pagetile.engine.triton_score import bound_of

pytestmark = pytest.mark.interpret


def home():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_sampler(rows, vocab_size, device):
    """A sampler of these rows that draws by kernels on any device."""
    sampler = Sampler(len(rows), vocab_size, device)
    sampler.start(range(len(rows)), rows)
    lengths = [len(r.prompt_token_ids) + len(r.output_token_ids) for r in rows]
    sampler.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
    return sampler


def draw_by_kernels(logits, rows, step_masks=None):
    """Draw by kernels: tokens, largest logits, log-probabilities, and the sampler afterwards."""
    sampler = make_sampler(rows, logits.shape[1], home())
    where = torch.arange(len(rows), device=home())
    masks = None if step_masks is None else step_masks.to(home())
    packed = draw(logits.to(home()), where, sampler, masks)
    return (*(part.cpu() for part in unpack(packed, len(rows))), sampler)


@triton.jit
def edge_kernel(
    edges, logits, lengths, ints, floats, addresses, stride, vocab_size, num_words,
    THREADS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    row = i.to(tl.int64)
    source = i, row, position_of(row, lengths, ints), logits, ints, floats, addresses
    scalars = stride, vocab_size, num_words
    best = tl.load(edges + i)
    tl.store(edges + i, from_order(find_edge(source, scalars, None, best, THREADS, EACH)))


def find_edges(logits, rows):
    """The smallest logit that the kernel keeps of each row."""
    n, vocab_size = logits.shape
    sampler, logits = make_sampler(rows, vocab_size, home()), logits.to(home())
    edges = logits.max(dim=1).values
    edge_kernel[(n,)](
        edges, logits, sampler.lengths, sampler.ints, sampler.floats, sampler.addresses,
        logits.stride(0), vocab_size, -(-vocab_size // 32), THREADS=128, EACH=8, num_warps=4,
    )  # fmt: skip
    return edges.cpu()


def keep_by_sorting(logits, params):
    """Which tokens top_k, top_p and min_p keep of a row: float64, sorted, ties stay."""
    x = logits.double()
    kept = torch.ones_like(x, dtype=torch.bool)
    if params.top_k:
        kept &= x >= x.sort(descending=True).values[min(params.top_k, len(x)) - 1]
    weights = ((x - x.max()) / params.temperature).exp() * kept
    if params.top_p < 1:
        order = x.argsort(descending=True, stable=True)
        share = weights[order].cumsum(0) / weights.sum()
        last = int((share < params.top_p).sum())
        kept &= x >= x[order[min(last, len(x) - 1)]]
    if params.min_p:
        kept &= x >= x.max() + params.temperature * math.log(params.min_p)
    return kept


def row(seed=0, prompt=(), output=(), **options):
    return SamplingInput(SamplingParams(**options), prompt, output, seed, 0)


CUTS = [
    {"top_k": 2},
    {"top_k": 7},
    {"top_k": 500},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 0.6},
    {"top_p": 1e-9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.81, "temperature": 0.7},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.1, "temperature": 2.0},
    {"top_p": 0.9, "temperature": 1e4},
    {"top_p": 0.9, "temperature": 1e-3},
    {"top_p": 0.9, "temperature": 1e20},
]


SIZE = 1021  # one tile; a prime, so that no share of equal tokens is a whole number of them


def spread(kind, generator):
    """A row of logits of some kind."""
    x = torch.randn(SIZE, generator=generator)
    if kind == "even":
        return x * 3
    if kind == "rounded":
        return (x * 3).bfloat16().float()
    if kind == "peaked":
        x[torch.randint(SIZE, (4,), generator=generator)] += 12
        return x
    if kind == "equal":
        return torch.full((SIZE,), 2.5)
    if kind == "outliers":
        x[::3], x[1::7] = -math.inf, -1e30
        return x
    if kind == "around zero":
        return x * 1e-30
    assert kind == "few"
    return torch.randint(-2, 3, (SIZE,), generator=generator) * 0.5


@pytest.mark.parametrize(
    "kind", ["even", "rounded", "peaked", "equal", "outliers", "around zero", "few"]
)
def test_edges_are_those_of_sorting(kind):
    generator = torch.Generator().manual_seed(len(kind))
    logits = torch.stack([spread(kind, generator) for _ in CUTS])
    edges = find_edges(logits, [row(**options) for options in CUTS])
    for x, edge, options in zip(logits, edges, CUTS, strict=True):
        expected = keep_by_sorting(x, SamplingParams(**options))
        assert torch.equal(x >= edge, expected), options


@pytest.mark.parametrize("kind", ["even", "peaked", "outliers", "equal"])
def test_what_is_drawn_with_cuts_is_kept_and_what_torch_draws(kind):
    generator = torch.Generator().manual_seed(1)
    rows = [row(seed=seed, **options) for options in CUTS for seed in range(2)]
    logits = torch.stack([spread(kind, generator) for _ in rows])
    tokens, _, _, on_device = draw_by_kernels(logits, rows)
    on_host = make_sampler(rows, SIZE, torch.device("cpu"))
    expected, *_ = on_host.sample(logits, torch.arange(len(rows)), range(len(rows)))
    assert tokens.tolist() == expected.tolist()
    assert torch.equal(on_device.last_tokens.cpu(), tokens)
    assert torch.equal(on_device.lengths.cpu(), on_host.lengths)
    for x, token, input_ in zip(logits, tokens, rows, strict=True):
        assert keep_by_sorting(x, input_.params)[token]


@triton.jit
def noise_kernel(noise, bound, words, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    word = tl.load(words + at).to(tl.uint32, bitcast=True)
    tl.store(noise + at, noise_of(word))
    tl.store(bound + at, bound_of(word))


def test_bounds_of_noise_are_no_less_than_its_logarithm_and_close():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32)
    words[:64] = torch.arange(64)
    words[64:95] = 2 ** torch.arange(31)
    words[95:126] = 2 ** torch.arange(31) - 1
    words = words.to(home())
    noise, bound = torch.empty(2, 4096, device=home())
    noise_kernel[(1,)](noise, bound, words, SIZE=4096)
    wins = -noise.double().log()
    assert (bound >= wins).all()
    is_small = noise < 0.01
    assert is_small.sum() > 90
    assert (bound - wins)[is_small].max() < 0.08


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_programs_of_several_tiles_find_what_those_of_one_find(dtype, monkeypatch):
    asked = [{}, {"temperature": 0.0}, {"temperature": 1e-3}, {"temperature": 1e4}, {"logprobs": 2},
             {"logit_bias": {5: 9.0}}, {"top_k": 5}, {}, {}, {}, {"temperature": 0.0}]  # fmt: skip
    rows = [row(seed=seed, **options) for seed, options in enumerate(asked)]
    logits = 3 * torch.randn(len(rows), 5 * triton_draw.TILE + 700)
    logits[7, 9000], logits[8, 3], logits[9] = math.nan, math.inf, -math.inf
    logits[10, [2000, 9000]] = 100.0
    found = []
    for fewest in (1, len(rows) + 1):
        monkeypatch.setattr(triton_draw, "FEWEST_ROWS", fewest)
        tokens, best, _, sampler = draw_by_kernels(logits.to(dtype), rows)
        found.append(
            (tokens.tolist(), best.nan_to_num(nan=-1.0).tolist(), sampler.lengths.tolist())
        )
    assert triton_draw.count_tiles(len(rows), 2) == 1
    assert found[0] == found[1]
    assert found[0][0][10] == 2000


@pytest.mark.parametrize("fewest", [1, 99])
def test_logits_of_rows_that_get_no_token_may_be_left_unread(fewest, monkeypatch):
    monkeypatch.setattr(triton_draw, "FEWEST_ROWS", fewest)
    rows = [row(seed=seed, **options) for seed, options in enumerate([{}, {"top_k": 5}, {}])]
    where = torch.tensor([2, -1, 0, -1, -1, 1, -1], dtype=torch.int32)
    logits = 3 * torch.randn(len(where), 3 * triton_draw.TILE + 700)
    logits[where < 0] = math.nan
    found = []
    for leaves_out in (False, True):
        sampler = make_sampler(rows, logits.shape[1], home())
        packed = draw(logits.to(home()), where.to(home()), sampler, leaves_out=leaves_out)
        tokens, best, _ = (part.cpu()[where >= 0] for part in unpack(packed, len(where)))
        assert best.isfinite().all()
        assert torch.equal(sampler.last_tokens[where[where >= 0].long()].cpu(), tokens)
        found.append((tokens.tolist(), best.tolist(), sampler.lengths.tolist()))
    assert found[0] == found[1]


def test_bad_rows_do_not_stall():
    logits = torch.zeros(5, 300)
    logits[1, 3], logits[2, 4], logits[3] = math.nan, math.inf, -math.inf
    rows = [row(), *[row(top_k=3, top_p=0.5, min_p=0.1)] * 3, row(temperature=0.0, top_k=3)]
    tokens, best, _, sampler = draw_by_kernels(logits, rows)
    assert best.isfinite().tolist() == [True, False, False, False, True]
    assert tokens[1:].tolist() == [0] * 4
    assert sampler.lengths.tolist() == [1] * 5


def random_rows(rng, num_rows, vocab_size):
    def pick(*options):
        return options[rng.integers(len(options))]

    def ids(most):
        return rng.integers(0, vocab_size + 3, int(rng.integers(most + 1))).tolist()

    rows = []
    for i in range(num_rows):
        output = ids(9)
        params = SamplingParams(
            temperature=pick(0.0, 0.5, 1.0, 2.5),
            top_k=int(pick(0, 0, 1, 5, 50)),
            top_p=pick(1.0, 1.0, 0.3, 0.9),
            min_p=pick(0.0, 0.0, 0.02),
            presence_penalty=pick(0.0, 0.0, 0.5, -1.0),
            frequency_penalty=pick(0.0, 0.0, 0.25),
            repetition_penalty=pick(1.0, 1.0, 1.3, 0.7),
            logprobs=pick(None, 0, 1, MAX_TOP),
            min_tokens=pick(0, 0, 4),
            max_tokens=None,
            allowed_token_ids=pick(None, None, [*range(0, vocab_size, 3)]),
            logit_bias={int(t): float(rng.uniform(-5, 5)) for t in ids(3)},
        )
        rows.append(
            SamplingInput(
                params, ids(6), output, int(rng.integers(2**60)), i, tuple(ids(2)), ((3,),)
            )
        )
    return rows


@pytest.mark.parametrize(
    ("seed", "dtype"), [*zip(range(4), [torch.float32, torch.float16] * 2, strict=True)]
)
def test_tokens_counts_and_logprobs_are_those_of_torch(seed, dtype):
    rng = np.random.default_rng(seed)
    vocab_size = int(pick_size(seed))
    rows = random_rows(rng, 12, vocab_size)
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(12, vocab_size, generator=generator) * 3).to(dtype)
    logits[4, :] = 0.0
    logits[5, 7 % vocab_size] = math.nan
    logits[6, ::2] = -math.inf
    masks = np.stack([pack_bits(rng.random(vocab_size) < 0.8) for _ in rows])
    given = [(i, mask) for i, mask in enumerate(masks) if i % 2]
    step_masks = torch.full(masks.shape, -1, dtype=torch.int32)
    for i, mask in given:
        step_masks[i] = torch.from_numpy(mask)
    on_host = make_sampler(rows, vocab_size, torch.device("cpu"))
    where = torch.arange(12)
    results = on_host.sample(logits, where, range(12), given)
    tokens, best = torch.from_numpy(results.tokens), torch.from_numpy(results.best)
    found, top, report, on_device = draw_by_kernels(logits, rows, step_masks)
    is_good = best.isfinite()
    assert torch.equal(top.isfinite(), is_good)
    assert torch.equal(top[is_good], best[is_good])
    assert found.tolist() == tokens.where(is_good, 0).tolist()
    assert torch.equal(on_device.lengths.cpu(), on_host.lengths)
    assert torch.equal(on_device.last_tokens.cpu(), on_host.last_tokens)
    for at in np.flatnonzero(on_host.features & Feature.PENALTY):
        if is_good[at]:
            counts = [s._tables[at].counts.cpu() for s in (on_host, on_device)]
            assert torch.equal(*counts)
    check_reports(logits, rows, found, report, is_good)


def pick_size(seed):
    """Vocabularies of one tile and of several, and of a few tokens."""
    return [37, 2048, 4501, 2100][seed]


def check_reports(logits, rows, tokens, report, is_good):
    asked = [r.params.logprobs for r in rows]
    vocab_size = logits.shape[1]
    wanted = [None if n is None else min(n, vocab_size) for n in asked]
    expected = compute_logprobs(logits, tokens, min(MAX_TOP, vocab_size))
    pairs = zip(
        read_logprobs(report, tokens.tolist(), wanted),
        read_logprobs(expected, tokens.tolist(), wanted),
        is_good.tolist(),
        strict=True,
    )
    for mine, exact, good in pairs:
        assert (mine is None) == (exact is None)
        if mine is None or not good:
            continue
        assert (mine.token_id, mine.rank, mine.top_ids) == (
            exact.token_id, exact.rank, exact.top_ids,
        )  # fmt: skip
        numbers = [mine.logprob, *mine.top_logprobs], [exact.logprob, *exact.top_logprobs]
        assert numbers[0] == pytest.approx(numbers[1], rel=2e-6, abs=2e-6)


def test_likeliest_tokens_have_the_lowest_id_first_among_equals():
    logits = torch.zeros(3, 5000)
    logits[0, [4999, 2048, 4096, 2, 1]] = 1.0
    logits[1] = -math.inf
    logits[1, [4000, 5]] = 0.0
    logits[2, 1::2] = -0.0
    rows = [row(logprobs=MAX_TOP, temperature=0.0)] * 3
    tokens, _, report, _ = draw_by_kernels(logits, rows)
    found = read_logprobs(report, tokens.tolist(), [MAX_TOP] * 3)
    assert found[0].top_ids[:7] == [1, 2, 2048, 4096, 4999, 0, 3]
    assert found[1].top_ids == [5, 4000, 0, 1, 2, 3, 4, *range(6, 19)]
    assert found[2].top_ids == [*range(20)]
    assert [f.rank for f in found] == [5, 2, 5000]


def test_a_row_with_many_logprobs_leaves_those_of_its_neighbours_as_they_are():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 100, generator=generator)
    asked = [3, 60, MAX_TOP]
    rows = [row(seed=i, logprobs=n) for i, n in enumerate(asked)]
    tokens, _, report, _ = draw_by_kernels(logits, rows)
    here = (part.to(home()) for part in (report, logits, tokens))
    both = add_logprobs(*here, [1], 60)
    alone = read_logprobs(report, tokens.tolist(), [3, None, MAX_TOP])
    found = read_logprobs(both, tokens.tolist(), asked)
    assert [found[0], found[2]] == [alone[0], alone[2]]
    assert len(found[1].top_ids) == 60


def sample_both_ways(logits, inputs, host_rows, **options):
    """The choices of a sampler of four rows with torch and with kernels, and the samplers."""
    found = []
    for device, kernels in ((torch.device("cpu"), None), (home(), triton_draw)):
        sampler = Sampler(4, logits.shape[1], device)
        sampler.start(range(len(inputs)), inputs)
        lengths = [len(r.prompt_token_ids) + len(r.output_token_ids) for r in inputs]
        sampler.lengths[: len(inputs)] = torch.tensor(lengths, dtype=torch.int32)
        sampler._kernels = kernels
        where = torch.tensor(host_rows, device=device)
        results = sampler.sample(logits.to(device), where, host_rows, **options)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append((sampler.collect(results, host_rows), sampler))
    return found


def test_drafts_are_sampled_by_kernels_as_by_torch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 32, generator=generator)
    logits[:, 8] = 12.0  # an end, too early before the third drafted token
    logits[1, 6] = logits[5, 9] = 20.0  # the ends of bad words
    params = SamplingParams(
        min_tokens=5, repetition_penalty=1.3, frequency_penalty=0.5, top_k=20, logit_bias={7: 2.0}
    )
    bad_words = ((3, 4, 9), (4, 6), (5,))
    inputs = [
        SamplingInput(params, [1, 2, 3], [6, 3], 11, 0, (0, 8), bad_words),
        SamplingInput(SamplingParams(top_p=0.7), [1], [2], 5, 0),
    ]
    draft = [4, 4, 9, 3, 4]
    drafts = [draft[:n] for n in range(6)] + [[], [3]]
    (expected, _), (found, sampler) = sample_both_ways(
        logits, inputs, [0] * 6 + [1] * 2, drafts=drafts
    )
    assert found == expected
    assert sampler.lengths.tolist() == [5, 2, 0, 0], "no row advances"
    counts = sampler._tables[0].counts.cpu()
    assert counts.nonzero()[:, 0].tolist() == [1, 2, 3, 6], "nor is a draft counted"


def test_masks_and_bad_words_are_heeded_by_kernels_as_by_torch():
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    logits[1, 31], logits[2, 63] = 9.0, 9.0
    words = ((4, 31), (9, 63))
    inputs = [row(seed=i, output=[4], top_p=0.9) for i in range(3)]
    inputs[1:] = [SamplingInput(r.params, (), (4,), 1, 0, (), words) for r in inputs[1:]]
    masks = [(0, pack_bits(np.isin(np.arange(70), [5, 68])))]
    (expected, _), (found, _) = sample_both_ways(logits, inputs, [0, 1, 2], masks=masks)
    assert found == expected
    assert found.token_ids[0] in (5, 68)
    assert found.token_ids[1] != 31
    assert found.token_ids[2] == 63


def test_kernels_for_masks_are_compiled_beforehand_on_no_row(monkeypatch):
    launched = []
    monkeypatch.setattr(
        triton_draw, "draw", lambda *args: launched.append(args[1].tolist()) or draw(*args)
    )
    sampler = make_sampler([row()], 50, home())
    triton_draw.compile_masks(torch.zeros(3, 50, device=home()), sampler)
    assert sorted(launched) == [[-1], [-1, -1, -1]]
    assert sampler.lengths.tolist() == [0]
