"""A paged model's logits are those of the same model run eagerly on whole sequences."""

from __future__ import annotations

import copy
import random
from functools import cache

import pytest
import torch
from tiny_models import ADAPTED, FAMILIES, UNUSUAL, tiny_model

from pagetile import PagedBatch, ShapeError, UnsupportedError
from pagetile.kv_cache import BlockPool
from pagetile.kv_cache.storage import KVCache
from pagetile.models import ForwardBatch, PagedModel, load_model
from pagetile.models import attention as attention_module

LENGTHS = (5, 19, 31)  # the longer ones reach past every window, twice
NOWHERE = 2147480000  # a block id past the end of a table row, which may be anything


def sequences_of(vocab_size: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator) for n in LENGTHS]


def eager_logits(model, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [model(input_ids=s[None], use_cache=False).logits[0] for s in sequences]


def row_errors(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Errors relative to the spread of a token's logits."""
    logits, expected = logits.double(), expected.double()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return (logits - expected).norm(dim=-1) / spread


class Packing:
    """Feeds sequences to a model in random chunks, from shuffled blocks full of NaN."""

    def __init__(
        self, model: PagedModel, sequences: list[torch.Tensor], block_size: int, seed: int
    ) -> None:
        self.rng = random.Random(seed)
        self.model, self.sequences, self.block_size = model, sequences, block_size
        needs = [-(-len(s) // block_size) for s in sequences]
        cache = KVCache(model.layers, BlockPool(sum(needs) + 3, block_size), dtype=model.dtype)
        for blocks in (*cache.k, *cache.v):
            blocks.fill_(torch.nan)
        model.bind(cache)
        blocks = list(range(cache.num_blocks))
        self.rng.shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(need)] for need in needs]
        self.num_done = [0] * len(sequences)

    def chunk(self) -> list[int]:
        """New tokens of each sequence: some none, most a few, sometimes one each."""
        left = [len(s) - n for s, n in zip(self.sequences, self.num_done, strict=True)]
        if self.rng.random() < 0.3:
            return [min(1, n) for n in left]
        return [self.rng.choice((0, min(n, 1), self.rng.randint(0, n), min(n, 11))) for n in left]

    def step(self, counts: list[int]) -> ForwardBatch:
        ends = [at + n for at, n in zip(self.num_done, counts, strict=True)]
        width = max(map(len, self.tables)) + 1
        # An empty sequence is in every batch; its row and all tails lead nowhere.
        rows = [table + [NOWHERE] * (width - len(table)) for table in (*self.tables, [])]
        positions = [list(range(at, end)) for at, end in zip(self.num_done, ends, strict=True)]
        slots = [
            table[at // self.block_size] * self.block_size + at % self.block_size
            for table, ats in zip(self.tables, positions, strict=True)
            for at in ats
        ]
        tokens = [s[at:end] for s, at, end in zip(self.sequences, self.num_done, ends, strict=True)]
        starts = torch.tensor([0, *counts, 0]).cumsum(0).to(torch.int32)
        return ForwardBatch(
            token_ids=torch.cat(tokens),
            positions=torch.tensor([at for ats in positions for at in ats]),
            batch=PagedBatch(
                block_tables=torch.tensor(rows, dtype=torch.int32),
                seq_lens=torch.tensor([*ends, 0], dtype=torch.int32),
                cu_seqlens_q=starts,
                max_query_len=max(counts),
                max_seq_len=max(ends),
            ),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            logits_rows=torch.arange(sum(counts)),
        )

    def run(self) -> list[torch.Tensor]:
        """All logits of every sequence."""
        found: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        while any(n < len(s) for n, s in zip(self.num_done, self.sequences, strict=True)):
            counts = self.chunk()
            if sum(counts) == 0:
                continue
            logits = self.model.forward(self.step(counts))
            for seq, rows in enumerate(logits.split(counts)):
                found[seq].append(rows)
                self.num_done[seq] += counts[seq]
        return [torch.cat(rows) for rows in found]


@cache
def loaded(family: str) -> tuple[PagedModel, list[torch.Tensor], torch.Tensor]:
    """A family's paged model, sequences, and the logits of the model itself."""
    model = tiny_model(family)
    sequences = sequences_of(model.config.vocab_size)
    expected = torch.cat(eager_logits(model, sequences))
    return load_model(model), sequences, expected


@pytest.mark.parametrize("family", FAMILIES + UNUSUAL + ADAPTED)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_packed_chunks_give_the_logits_of_whole_sequences(family, block_size):
    model, sequences, expected = loaded(family)
    logits = torch.cat(Packing(model, sequences, block_size, seed=block_size).run())
    assert logits.shape == expected.shape
    # A layer or two of float32 rounding, whose unit is 1.2e-7.
    assert row_errors(logits, expected).max() < 64 * torch.finfo(torch.float32).eps


def test_bfloat16_is_as_near_to_the_truth_as_its_own_eager_forward():
    model = tiny_model("llama", dtype=torch.bfloat16)
    sequences = sequences_of(model.config.vocab_size)
    exact = copy.deepcopy(model)
    for parameter in exact.parameters():
        parameter.data = parameter.data.double()
    truth = torch.cat(eager_logits(exact, sequences))
    eager = row_errors(torch.cat(eager_logits(model, sequences)), truth)
    paged = row_errors(torch.cat(Packing(load_model(model), sequences, 4, seed=0).run()), truth)
    assert paged.median() <= 2 * eager.median()
    assert paged.max() <= 2 * eager.max()


def test_only_the_wanted_rows_come_back_in_their_order():
    model = load_model(tiny_model("llama"))
    packing = Packing(model, sequences_of(model.vocab_size), 4, seed=0)
    step = packing.step([5, 7, 9])
    whole = model.forward(step)
    rows = torch.tensor([20, 4, 4, 11])
    some = model.forward(
        ForwardBatch(step.token_ids, step.positions, step.batch, step.slot_mapping, rows)
    )
    torch.testing.assert_close(some, whole[rows])
    none = rows[:0]
    empty = model.forward(
        ForwardBatch(step.token_ids, step.positions, step.batch, step.slot_mapping, none)
    )
    assert empty.shape == (0, model.vocab_size)


def test_a_forward_without_logits_to_keep_is_cut_afterwards():
    from transformers import LlamaForCausalLM

    class Plain(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, use_cache=None, return_dict=None):
            return super().forward(
                input_ids=input_ids, position_ids=position_ids, use_cache=use_cache
            )

    original = tiny_model("llama")
    plain = Plain(original.config).eval()
    plain.load_state_dict(original.state_dict())
    results = []
    for model in map(load_model, (original, plain)):
        step = Packing(model, sequences_of(model.vocab_size), 4, seed=0).step([5, 7, 9])
        rows = torch.tensor([4, 11])
        results.append(
            model.forward(
                ForwardBatch(step.token_ids, step.positions, step.batch, step.slot_mapping, rows)
            )
        )
    torch.testing.assert_close(*results)


def test_layers_that_share_keys_own_no_blocks():
    model = load_model(tiny_model("gemma3n"))
    assert [layer.sliding_window for layer in model.layers] == [7, None, 7]
    assert model.config.num_hidden_layers == 5


def test_layers_that_share_keys_write_nothing(monkeypatch):
    model = load_model(tiny_model("gemma3n"))
    written = []
    monkeypatch.setattr(
        attention_module, "write_kv", lambda k, v, cache, *args, **scales: written.append(cache)
    )
    packing = Packing(model, sequences_of(96), 4, seed=0)
    model.forward(packing.step([1, 1, 1]))
    assert len({blocks.data_ptr() for blocks in written}) == len(written) == 3


def test_a_layer_that_leaves_tokens_out_is_refused():
    from transformers import AttentionInterface

    paged = load_model(tiny_model("olmo2"))  # whose layers are not fused
    packing = Packing(paged, sequences_of(96), 4, seed=0)

    def cut(module, query, *args, **options):
        return attention_module.attend(module, query[:, :, 1:], *args, **options)

    AttentionInterface.register(attention_module.NAME, cut)
    try:
        with pytest.raises(UnsupportedError, match="passed 2 of 3 tokens to its attention"):
            paged.forward(packing.step([1, 1, 1]))
    finally:
        attention_module.register()


def test_values_may_be_narrower_than_keys():
    model = load_model(tiny_model("deepseek_v3"))
    assert {(layer.head_size, layer.v_head_size) for layer in model.layers} == {(24, 16)}


def test_what_a_paged_model_says_of_itself():
    model = load_model(tiny_model("gemma2", eos_token_id=[7, 9]), max_model_len=100)
    assert [layer.sliding_window for layer in model.layers] == [7, None, 7]
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (96, 100, (7, 9))
    assert (model.dtype, model.device.type, model.config.model_type) == (
        torch.float32,
        "cpu",
        "gemma2",
    )


def test_the_model_inside_still_generates_by_itself():
    model = tiny_model("mistral", pad_token_id=0)
    prompt = torch.tensor([[3, 0, 50, 0]])

    def generate() -> list[int]:
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        return output[0].tolist()

    before = generate()
    implementation = model.config._attn_implementation
    paged = load_model(model)
    Packing(paged, sequences_of(96), 4, seed=0).run()
    assert generate() == before
    assert model.config._attn_implementation == implementation
    assert model.config.pad_token_id == 0


def test_two_paged_models_of_one_model_keep_apart():
    model = tiny_model("llama")
    sequences = sequences_of(96)
    expected = torch.cat(eager_logits(model, sequences))
    first = Packing(load_model(model), sequences, 4, seed=0)
    second = Packing(load_model(model), sequences, 1, seed=1)
    for packing in (first, second, first, second):
        counts = [3, 5, 7] if packing.num_done[0] == 0 else [2, 4, 6]
        logits = packing.model.forward(packing.step(counts))
        packing.num_done = [at + n for at, n in zip(packing.num_done, counts, strict=True)]
        starts = (0, LENGTHS[0], sum(LENGTHS[:2]))
        rows = [
            start + at - n + i
            for start, at, n in zip(starts, packing.num_done, counts, strict=True)
            for i in range(n)
        ]
        assert row_errors(logits, expected[rows]).max() < 1e-5


def test_a_forward_does_not_search_for_padding():
    model = tiny_model("gpt2", pad_token_id=0)
    seen = []
    model.transformer.register_forward_pre_hook(
        lambda module, args: seen.append(module.config.pad_token_id)
    )
    paged = load_model(model)
    paged.forward(Packing(paged, sequences_of(96), 4, seed=0).step([1, 0, 0]))
    assert seen
    assert set(seen) == {None}
    assert model.config.pad_token_id == 0


def test_queries_keys_and_values_are_not_copied(monkeypatch):
    model = tiny_model("qwen2")
    paged = load_model(model)
    passed, written = [], []
    paged_attention, write_kv = attention_module.paged_attention, attention_module.write_kv

    def attend(q, *args, **options):
        passed.append(q)
        return paged_attention(q, *args, **options)

    def write(k, v, *args, **scales):
        written.extend((k, v))
        write_kv(k, v, *args, **scales)

    monkeypatch.setattr(attention_module, "paged_attention", attend)
    monkeypatch.setattr(attention_module, "write_kv", write)
    outputs, inputs = [], []
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, out: inputs.append(out))
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, args: outputs.append(args[0])
        )
    paged.forward(Packing(paged, sequences_of(96), 4, seed=0).step([5, 6, 7]))
    assert [q.shape for q in passed] == [(18, 4, 16)] * 3
    values = written[1::2]
    assert [v.data_ptr() for v in values] == [v.data_ptr() for v in inputs]
    assert all(out.is_contiguous() for out in outputs)


def test_a_forward_without_a_cache_says_so():
    fresh, unbound = load_model(tiny_model("llama")), load_model(tiny_model("llama"))
    step = Packing(unbound, sequences_of(96), 4, seed=0).step([1, 1, 1])
    unbound.bind(None)
    for model in (fresh, unbound):
        with pytest.raises(UnsupportedError, match="has no cache: call bind"):
            model.forward(step)


def test_a_cache_of_another_model_does_not_bind():
    model, other = load_model(tiny_model("llama")), load_model(tiny_model("gpt2"))
    with pytest.raises(ShapeError, match="not those that LlamaForCausalLM needs"):
        model.bind(KVCache(other.layers, BlockPool(2, 16)))


def test_our_attention_called_by_another_says_so():
    model = tiny_model("llama")
    load_model(model)
    model.set_attn_implementation("pagetile")
    with pytest.raises(UnsupportedError, match=r"outside of PagedModel\.forward"):
        model(torch.tensor([[1, 2, 3]]))


def test_dropout_waits_while_a_model_in_training_runs_here():
    model = tiny_model("olmo2", attention_dropout=0.5).train()  # whose layers are not fused
    paged = load_model(model)
    assert model.training
    packing = Packing(paged, sequences_of(96), 4, seed=0)
    paged.forward(packing.step([1, 1, 1]))
    assert all(module.training for module in model.modules())
    model.eval()
    model.model.layers[1].train()  # where no check looks
    with pytest.raises(UnsupportedError, match=r"dropout=0\.5: call model\.eval"):
        paged.forward(packing.step([1, 1, 1]))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_causal": False}, "bidirectional"),
        ({"position_bias": 1}, "position_bias"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "mask of its own making"),
    ],
)
def test_what_a_model_did_not_ask_for_before_is_refused(options, reason):
    model = tiny_model("llama")
    paged = load_model(model)
    packing = Packing(paged, sequences_of(96), 4, seed=0)
    model.model.layers[2].self_attn.register_forward_pre_hook(
        lambda module, args, given: (args, {**given, **options}), with_kwargs=True
    )
    with pytest.raises(UnsupportedError, match=reason):
        paged.forward(packing.step([1, 1, 1]))


def test_a_failed_forward_leaves_nothing_behind():
    model = tiny_model("llama")
    implementation = model.config._attn_implementation
    paged = load_model(model)
    packing = Packing(paged, sequences_of(96), 4, seed=0)
    step = packing.step([1, 1, 1])
    with pytest.raises(IndexError):
        paged.forward(
            ForwardBatch(
                step.token_ids + 96, step.positions, step.batch, step.slot_mapping, step.logits_rows
            )
        )
    assert model.config._attn_implementation == implementation
    assert not any("pagetile_layer" in vars(module) for module in model.modules())
    paged.forward(step)
