"""The kernels of a decode step compute the same as the torch code in the same modules."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from pagetile import BlockPool, KVCache
from pagetile.engine import LLM, Engine
from pagetile.engine.cuda_graphs import padded_sizes, prompt_sizes
from pagetile.engine.sampler import Sampler
from pagetile.engine.sampling_params import SamplingParams
from pagetile.engine.sampling_rows import SamplingInput
from pagetile.models import load_model
from pagetile.models.forward_batch import ForwardBatch
from pagetile.ops.paged_attention import PagedBatch

BLOCK_SIZE, WIDTH, NUM_ROWS, VOCAB_SIZE = 4, 9, 7, 5000


def home():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_sampler(device, seed=0, temperature=0.8):
    """Rows that are greedy and random in turn, of different lengths."""
    sampler = Sampler(NUM_ROWS, VOCAB_SIZE, torch.device("cpu"))
    inputs = [
        SamplingInput(
            SamplingParams(temperature=temperature if row % 3 else 0.0),
            range(2 + row), (), seed + row, row,
        )
        for row in range(NUM_ROWS)
    ]  # fmt: skip
    sampler.start(range(NUM_ROWS), inputs)
    generator = torch.Generator().manual_seed(seed)
    sampler.lengths.copy_(torch.randint(7, WIDTH * BLOCK_SIZE, (NUM_ROWS,), generator=generator))
    sampler.lengths[2] = BLOCK_SIZE * 2 + 1  # a block of its own for the last token
    sampler.last_tokens.copy_(torch.randint(0, VOCAB_SIZE, (NUM_ROWS,), generator=generator))
    for name in ("lengths", "last_tokens", "ints", "floats", "addresses"):
        setattr(sampler, name, getattr(sampler, name).to(device))
    return sampler


@pytest.mark.interpret
def test_begin_lays_out_the_rows_of_the_inbox():
    from pagetile.engine.triton import DecodeBuffers

    sampler = make_sampler(home())
    tables = torch.arange(NUM_ROWS * WIDTH, dtype=torch.int32).view(NUM_ROWS, WIDTH)
    buffers = DecodeBuffers(tables.to(home()), sampler, BLOCK_SIZE)
    buffers.inbox[:8] = torch.tensor([5, 2, -1, 0, 91, 92, 0, 93])
    batch = buffers(4, 100)
    lengths, rows = sampler.lengths.cpu(), [5, 2, -1, 0]
    assert batch.batch.seq_lens.tolist() == [0 if r < 0 else int(lengths[r]) for r in rows]
    assert batch.batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert batch.batch.allows_early_reads
    for at, (row, block) in enumerate([(5, 91), (2, 92), (-1, 0), (0, 93)]):
        if row < 0:
            assert batch.slot_mapping[at] == -1
            continue
        position = int(lengths[row]) - 1
        expected = tables[row, : position // BLOCK_SIZE + 1].tolist()
        expected[-1] = block
        assert batch.token_ids[at] == sampler.last_tokens[row]
        assert batch.positions[at] == position
        assert batch.slot_mapping[at] == block * BLOCK_SIZE + position % BLOCK_SIZE
        assert batch.batch.block_tables[at, : len(expected)].tolist() == expected
        assert buffers._rows_tables[row, : len(expected)].tolist() == expected


def test_begin_s_stores_are_visible_to_kernels_that_do_not_wait():
    """Attention may read lengths and tables while the kernel that writes them still runs."""
    triton_compiler = pytest.importorskip("triton.backends.compiler")
    from pagetile.engine.triton import begin_kernel
    from pagetile.tiles.triton.launch import Launcher

    names = begin_kernel.arg_names
    types = dict.fromkeys(names[:3], "*i64") | dict.fromkeys(names[3:9], "*i32")
    types |= {"last_tokens": "*i64"} | dict.fromkeys(("size", "width"), "i32")
    constants = {"BLOCK_SIZE": 16, "TILE_W": 128, "PUBLISH": True}
    launcher = Launcher(begin_kernel, types, constants, num_warps=1)
    ptx = launcher.compile(triton_compiler.GPUTarget("cuda", 90, 32)).asm["ptx"]
    for path in ptx.split("ret;")[:-1]:
        assert path.rindex("fence.acq_rel.gpu") > path.rindex("st.global")


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature", [0.8, 1e-3, 1e300])
def test_drawn_tokens_are_those_of_torch_and_the_rows_advance(dtype, temperature):
    from pagetile.engine import triton_draw

    generator = torch.Generator().manual_seed(1)
    for seed in range(3):
        # A row of equal logits, one of NaN, one that allows nothing, one with nothing in a tile.
        logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=generator).mul(3).to(dtype)
        logits[3] = 0.0
        logits[4, 4500] = torch.nan
        logits[5] = -torch.inf
        logits[6, :4096] = -torch.inf
        on_host = make_sampler(torch.device("cpu"), seed, temperature)
        rows = torch.tensor([3, 1, 0, 4, 2, 5, 6])
        before = on_host.lengths.clone()
        results = on_host.sample(logits[rows], rows, rows.tolist())
        tokens, best = torch.from_numpy(results.tokens), torch.from_numpy(results.best)
        assert torch.equal(on_host.lengths[rows], before[rows] + 1)
        on_device = make_sampler(home(), seed, temperature)
        some = torch.tensor([3, 1, 0, -1, 4, 2, 5, 6], dtype=torch.int32)
        given = torch.cat([logits[rows[:3]], logits[:1], logits[rows[3:]]]).to(home())
        packed = triton_draw.draw(given, some.to(home()), on_device).cpu()
        found, top, _ = (part[some >= 0] for part in triton_draw.unpack(packed, 8))
        assert found.tolist() == tokens.tolist()
        assert torch.equal(top.isnan(), best.isnan())
        assert torch.equal(top.nan_to_num(), best.nan_to_num())
        assert torch.equal(on_device.lengths.cpu(), on_host.lengths)
        assert torch.equal(on_device.last_tokens.cpu(), on_host.last_tokens)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "num_rows", [1, 17, 33, *(pytest.param(n, marks=pytest.mark.gpu) for n in (31, 32, 64, 257))]
)
def test_a_step_of_any_number_of_rows_comes_back_as_it_was_drawn(num_rows):
    """A step of this size and one of half as many use the same memory."""
    from pagetile.engine.step_memory import StepMemory
    from pagetile.engine.triton_draw import draw

    asked = {"temperature": 0.7, "logprobs": 1}, {"top_k": 3}, {"temperature": 0.0}
    inputs = [
        SamplingInput(SamplingParams(**asked[row % 3]), range(5), (), row, 0)
        for row in range(num_rows)
    ]
    memory = StepMemory(torch.zeros(2 * num_rows, dtype=torch.int32, device=home()), num_rows)
    logits = torch.randn(num_rows, 2100, generator=torch.Generator().manual_seed(num_rows))
    samplers = [Sampler(num_rows, 2100, torch.device("cpu")) for _ in range(2)]
    for sampler in samplers:
        sampler.start(range(num_rows), inputs)
        sampler.lengths.fill_(5)
    on_host, by_kernels = samplers
    for name in ("lengths", "last_tokens", "ints", "floats", "addresses"):
        setattr(by_kernels, name, getattr(by_kernels, name).to(home()))
    for count in {num_rows} if num_rows > 100 else {num_rows, (num_rows + 1) // 2}:
        rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(count))[:count]
        found = on_host.collect(on_host.sample(logits[rows], rows, rows.tolist()), rows.tolist())
        given = torch.cat([rows, rows.new_full((num_rows - count,), -1)]).int()
        where = given.clamp(min=0).long()
        packed = draw(logits[where].to(home()), given.to(home()), by_kernels, leaves_out=True)
        results = memory.receive(packed, num_rows, has_logprobs=True)
        if memory.event is not None:
            memory.record()
            memory.event.synchronize()
        read = by_kernels.collect(results, rows.tolist())
        assert read.token_ids == found.token_ids
        assert read.logprobs.keys() == found.logprobs.keys()
        for at, token in read.logprobs.items():
            assert token.rank == found.logprobs[at].rank
            assert token.top_ids == found.logprobs[at].top_ids
    assert torch.equal(by_kernels.lengths.cpu(), on_host.lengths)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 16, 17, 100, 128, 1000])
def test_every_number_of_sequences_has_a_padded_size_not_far_above_it(max_num_seqs):
    sizes = padded_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        size = min(size for size in sizes if size >= num_seqs)
        assert size < num_seqs + max(16, num_seqs)
        assert size < 2 * num_seqs


@pytest.mark.parametrize("most", [1, 16, 40, 100, 2048, 10_000])
def test_every_number_of_prompt_tokens_has_a_padded_size_not_far_above_it(most):
    sizes = prompt_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(most, 8192)
    for num_tokens in range(16, sizes[-1] + 1):
        assert min(size for size in sizes if size >= num_tokens) <= 1.5 * num_tokens


@pytest.mark.interpret
def test_a_step_that_is_filled_up_has_the_same_logits_and_writes_the_same_keys():
    from pagetile.engine.triton_prompts import PromptBuffers

    model = load_model(tiny_model("gemma2"), device=home())
    generator = torch.Generator().manual_seed(0)
    sampler = make_sampler(home())
    row_tables = torch.zeros(NUM_ROWS, 6, dtype=torch.int32, device=home())
    buffers = PromptBuffers(row_tables, sampler, 32, BLOCK_SIZE)
    # Steps with other numbers of tokens leave stale values in the buffers; the smallest is last.
    for counts, ends in [((9, 1, 13), (20, 5, 13)), ((1, 4), (9, 4)), ((0, 2), (0, 3))]:
        starts = np.cumsum([0, *counts])
        step, arrays = make_step(model.vocab_size, sampler, row_tables, counts, ends, generator)
        caches = []
        for size in (int(starts[-1]), 32, int(starts[-1]) + 1):
            cache = KVCache(model.layers, BlockPool(30, BLOCK_SIZE), device=home())
            for blocks, seed in zip((*cache.k, *cache.v), range(99), strict=False):
                blocks.copy_(torch.randn(blocks.shape, generator=generator.manual_seed(seed)))
            model.bind(cache)
            if size == starts[-1]:
                expected = model.forward(step)
            else:
                buffers.fill(arrays, size, draws=True)
                batch = buffers(size)
                assert_lays_out(buffers, batch, step, arrays, size)
                computed = model.forward(batch)[: len(counts)]
                torch.testing.assert_close(computed, expected)
            caches.append(torch.stack([*cache.k, *cache.v]))
        torch.testing.assert_close(caches[1], caches[0])
        torch.testing.assert_close(caches[2], caches[0])


def assert_lays_out(buffers, batch, step, arrays, size):
    num_tokens, num_seqs = len(step.token_ids), len(arrays["rows"])
    for name in ("token_ids", "positions", "slot_mapping"):
        assert torch.equal(getattr(batch, name)[:num_tokens], getattr(step, name)), name
    assert (batch.slot_mapping[num_tokens:] == -1).all()
    assert (batch.positions[num_tokens:] == 0).all()
    assert torch.equal(batch.logits_rows[:num_seqs], step.logits_rows)
    assert batch.batch.cu_seqlens_q[-2:].tolist() == [num_tokens, size]
    assert batch.batch.seq_lens.tolist()[num_seqs:] == [
        *[0] * (len(batch.batch.seq_lens) - num_seqs - 1),
        size - num_tokens,
    ]
    for at, (row, end) in enumerate(zip(arrays["rows"], arrays["seq_lens"], strict=True)):
        width = -(-int(end) // BLOCK_SIZE)
        expected = step.batch.block_tables[at, :width]
        assert torch.equal(batch.batch.block_tables[at, :width], expected)
        assert torch.equal(buffers._rows_tables[row, :width], expected)
        assert buffers._sampler.lengths[row] == end
    assert buffers._sampler.lengths[6] == 33, "a sample that begins, without tokens of its own"
    drawn = arrays["sampled_rows"].tolist()
    assert buffers.drawn_rows(size).tolist() == drawn + [-1] * (
        len(buffers.drawn_rows(size)) - len(drawn)
    )
    assert buffers.sampled_rows(size, len(drawn)).tolist() == drawn


@pytest.mark.interpret
@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj", "gpt_neo"])
def test_a_step_may_be_filled_up_beyond_the_positions_of_a_model(family):
    """They look up a table of positions, and an index past its end makes a GPU unusable."""
    from pagetile.engine.triton_prompts import PromptBuffers

    model, _ = load_on_filled_cache(family, max_position_embeddings=20)
    sampler, generator = make_sampler(home()), torch.Generator().manual_seed(0)
    row_tables = torch.zeros(NUM_ROWS, 6, dtype=torch.int32, device=home())
    buffers = PromptBuffers(row_tables, sampler, 64, BLOCK_SIZE)
    buffers.clear(64)
    model.forward(buffers(64))
    _, arrays = make_step(model.vocab_size, sampler, row_tables, (9, 1), (20, 5), generator)
    buffers.fill(arrays, 64, draws=True)
    assert model.forward(buffers(64))[:2].isfinite().all()


@pytest.mark.interpret
def test_cleared_buffers_write_nothing():
    from pagetile.engine.triton_prompts import PromptBuffers

    model, cache = load_on_filled_cache("qwen3")
    sampler, generator = make_sampler(home()), torch.Generator().manual_seed(0)
    row_tables = torch.zeros(NUM_ROWS, 6, dtype=torch.int32, device=home())
    buffers = PromptBuffers(row_tables, sampler, 32, BLOCK_SIZE)
    _, arrays = make_step(model.vocab_size, sampler, row_tables, (9, 1), (20, 5), generator)
    buffers.fill(arrays, 32, draws=True)
    row_tables.fill_(7)
    before = sampler.lengths.clone()
    buffers.clear(16)
    model.forward(buffers(16))
    assert all((blocks == 0.5).all() for blocks in (*cache.k, *cache.v))
    assert (row_tables == 7).all()
    assert torch.equal(sampler.lengths, before)
    assert (buffers.drawn_rows(16) == -1).all()


def load_on_filled_cache(family, **config):
    """A small model, and its cache in which every number is 0.5."""
    model = load_model(tiny_model(family, **config), device=home())
    cache = KVCache(model.layers, BlockPool(30, BLOCK_SIZE), device=home())
    for blocks in (*cache.k, *cache.v):
        blocks.fill_(0.5)
    model.bind(cache)
    return model, cache


def make_step(vocab_size, sampler, row_tables, counts, ends, generator):
    """A step in torch, and its numbers as a runner gathers them.

    The last block of each sequence is new, as are those of its tokens; the last token of the
    first one is the device's. A row without tokens, the last one, begins as a sample.
    """
    num_seqs = len(counts)
    starts = torch.tensor([0, *counts]).cumsum(0)
    positions = torch.cat([torch.arange(end - n, end) for n, end in zip(counts, ends, strict=True)])
    seqs = torch.repeat_interleave(torch.arange(num_seqs), torch.tensor(counts))
    tables = torch.randperm(30, generator=generator)[: 6 * num_seqs].view(-1, 6).int()
    token_ids = torch.randint(vocab_size, (int(starts[-1]),), generator=generator)
    rows = torch.randperm(NUM_ROWS - 1, generator=generator)[:num_seqs].numpy()
    sampler.last_tokens %= vocab_size
    unread = np.array([int(starts[1]) - 1] if counts[0] else [], np.int64)
    token_ids[unread] = sampler.last_tokens[rows[0]].cpu()
    firsts, first_blocks, blocks = [], [], []
    for row, table, count, end in zip(rows, tables, counts, ends, strict=True):
        first = max(0, end - max(count, 1)) // BLOCK_SIZE
        row_tables[row, :first] = table[:first].to(row_tables.device)
        row_tables[row, first:] = -5
        firsts.append(first)
        first_blocks.append(len(blocks))
        blocks += table[first : -(-end // BLOCK_SIZE)].tolist()
    given = token_ids.clone()
    given[unread] = 0
    arrays = {
        "token_ids": given.numpy(), "seq_lens": np.array(ends, np.int32),
        "starts": starts.int().numpy(), "rows": rows,
        "sampled_rows": np.array([rows[-1], NUM_ROWS - 1]),
        "sampled_lens": np.array([ends[-1], 33]),
        "logits_rows": (starts[1:] - 1).clamp(min=0).numpy(), "unread_at": unread,
        "first_columns": np.array(firsts), "first_blocks": np.array(first_blocks),
        "block_ids": np.array(blocks, np.int32),
    }  # fmt: skip
    step = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        batch=PagedBatch(
            tables, torch.tensor(ends, dtype=torch.int32), starts.int(), max(counts), max(ends)
        ),
        slot_mapping=tables[seqs, positions // BLOCK_SIZE].long() * BLOCK_SIZE
        + positions % BLOCK_SIZE,
        logits_rows=(starts[1:] - 1).clamp(min=0),
    )
    return step, arrays


def test_packed_arrays_come_back_as_they_were():
    from pagetile.transfer import pack, unpack

    generator = np.random.default_rng(0)
    shapes = [(3,), (0,), (1,), (4, 5), (0, 7), (2, 0), (33,)]
    arrays = [
        generator.integers(-100, 100, shape).astype(dtype)
        for dtype in (np.int64, np.int32)
        for shape in shapes
    ]
    packed = pack(arrays, torch.device("cpu"))
    for tensor, array in zip(unpack(packed.clone(), arrays), arrays, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.data_ptr() % 16 == 0 or not array.size


@pytest.mark.interpret
def test_steps_whose_rows_and_blocks_are_as_before_send_nothing_and_sample_the_same(monkeypatch):
    from pagetile.engine.step_memory import StepMemory

    sent = []
    send = StepMemory.send
    monkeypatch.setattr(StepMemory, "send", lambda *args: sent.append(1) or send(*args))
    found = []
    for by_kernels in (False, True):
        model = load_model(tiny_model("llama", num_hidden_layers=1))
        cache = KVCache(model.layers, BlockPool(64, BLOCK_SIZE))
        engine = Engine(
            model, cache, max_num_seqs=6, max_num_batched_tokens=32, max_model_len=40,
            async_scheduling=True, num_speculative_tokens=0,
        )  # fmt: skip
        if by_kernels:
            engine._runner.use_kernels()
        params = SamplingParams(temperature=0.8, seed=4, max_tokens=14, ignore_eos=True)
        ids, num_decode = [], 0
        for step in range(60):
            if step == 0:
                ids += [engine.add_request([5, 6, 7], replace(params, temperature=0.0))]
                ids += [engine.add_request([5, 6, 7, 8, 9, 10], replace(params, n=2, logprobs=1))]
            if step == 5:  # a sequence leaves, another takes its row
                engine.abort(ids[0])
                ids += [engine.add_request([9, 8], replace(params, max_tokens=5))]
            if step in (7, 8, 10, 13):  # a prompt between two decode steps of the same sequences
                ids += [engine.add_request([step, 8], replace(params, max_tokens=1))]
            engine.step()
            engine.check()
            num_decode += sum(launched.step.is_decode for launched in engine._in_flight)
        found.append([engine.take_output(request_id).outputs for request_id in ids])
    assert not engine.has_unfinished
    for outputs, expected in zip(*found, strict=True):
        assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
        assert [one.finish_reason for one in outputs] == [one.finish_reason for one in expected]
    assert 4 < len(sent) < num_decode - 2


@pytest.mark.interpret
@pytest.mark.parametrize("speculative", [None, "ngram"])
def test_steps_that_an_engine_schedules_are_laid_out_as_torch_does(monkeypatch, speculative):
    """With chunks, forks, prefixes that are found, preemption and drafts."""
    from pagetile.engine.runner import Runner
    from pagetile.engine.triton_prompts import PromptBuffers

    place, laid_out = Runner._place, []

    def compare(runner, tensors, *longest):
        arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        state = SimpleNamespace(
            last_tokens=runner.sampler.last_tokens.clone(), lengths=runner.sampler.lengths.clone()
        )
        tables = runner._tables.clone()
        expected = place(runner, tensors, *longest)
        buffers = PromptBuffers(tables, state, 48, runner.cache.block_size)
        if buffers.takes(arrays):
            size = next(n for n in (8, 16, 32, 48) if n >= buffers.least(arrays))
            buffers.fill(arrays, size, draws=speculative is None)
            assert_same_step(buffers(size), expected, size, runner.cache.block_size)
            assert torch.equal(state.lengths, runner.sampler.lengths)
            assert torch.equal(tables, runner._tables)
            rows = arrays["sampled_rows"].tolist()
            assert buffers.sampled_rows(size, len(rows)).tolist() == rows
            drawn = [row for row in buffers.drawn_rows(size).tolist() if row >= 0]
            assert drawn == (rows if speculative is None else [])
            laid_out.append(arrays)
        return expected

    monkeypatch.setattr(Runner, "_place", compare)
    llm = LLM(
        tiny_model("qwen3"), device="cpu", num_blocks=14, block_size=4, max_num_seqs=5,
        max_model_len=40, max_num_batched_tokens=24, speculative=speculative, use_tqdm=False,
    )  # fmt: skip
    repeated = [5, 6, 7, 8] * 5
    prompts = [repeated, [*repeated, 9], [3], list(range(10, 40)), repeated]
    params = [SamplingParams(max_tokens=8, n=n, seed=n, ignore_eos=True) for n in (1, 2, 3, 1, 2)]
    llm.generate(prompts, params, use_tqdm=False)
    counts = [len(arrays["rows"]) for arrays in laid_out]
    assert max(counts) > 1
    assert any(len(a["sampled_rows"]) > len(a["rows"]) for a in laid_out), "samples fork"
    assert any((a["first_columns"] > 0).any() for a in laid_out), "a table that grows"


def assert_same_step(found, expected, size, block_size):
    num_tokens, num_rows = len(expected.token_ids), len(expected.logits_rows)
    for name in ("token_ids", "positions", "slot_mapping"):
        assert torch.equal(getattr(found, name)[:num_tokens], getattr(expected, name)), name
    assert (found.slot_mapping[num_tokens:] == -1).all()
    assert torch.equal(found.logits_rows[:num_rows], expected.logits_rows)
    num_seqs = expected.batch.num_seqs
    assert torch.equal(found.batch.seq_lens[:num_seqs], expected.batch.seq_lens)
    assert torch.equal(found.batch.cu_seqlens_q[: num_seqs + 1], expected.batch.cu_seqlens_q)
    assert found.batch.cu_seqlens_q[num_seqs + 1 :].tolist()[-1] == size
    for at, length in enumerate(expected.batch.seq_lens.tolist()):
        width = -(-length // block_size)
        tables = found.batch.block_tables, expected.batch.block_tables
        assert torch.equal(*(table[at, :width] for table in tables))
