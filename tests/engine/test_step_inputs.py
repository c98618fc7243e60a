"""A step filled up with empty sequences computes the same for the others."""

import numpy as np
import pytest
import torch

from pagetile.engine.cuda_graphs import padded_sizes
from pagetile.engine.step_inputs import StepInputs, make_batch
from pagetile.kv_cache import BlockPool
from pagetile.kv_cache.storage import KVCache
from pagetile.models import load_model
from pagetile.testing.models import tiny_model
from pagetile.transfer import pack, unpack

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def decode_inputs(tables, seq_lens):
    """One new token for each sequence, its last."""
    positions = np.array(seq_lens, np.int64) - 1
    blocks = tables[np.arange(len(seq_lens)), positions // BLOCK_SIZE].astype(np.int64)
    return StepInputs(
        token_ids=positions * 5 % 90 + 3,
        positions=positions,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        logits_rows=np.arange(len(seq_lens)),
        seq_lens=np.array(seq_lens, np.int32),
        starts=np.arange(len(seq_lens) + 1, dtype=np.int32),
        block_tables=tables,
    )


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("num_seqs", [3, 4, 7])
def test_empty_sequences_change_no_logits_and_write_nothing(family, num_seqs):
    model = load_model(tiny_model(family))
    cache = KVCache(model.layers, BlockPool(9, BLOCK_SIZE))
    for layer in (*cache.k, *cache.v):
        layer.normal_(generator=torch.Generator().manual_seed(0))
    tables = np.array([[7, 2, 5], [1, 0, 0], [8, 4, 0]], np.int32)
    inputs = decode_inputs(tables, [11, 2, 6])
    model.bind(cache)
    expected = model.forward(inputs.send(CPU))
    before = [layer.clone() for layer in (*cache.k, *cache.v)]
    padded = inputs.pad(num_seqs, width=5)
    tensors = [torch.from_numpy(array) for array in padded.arrays]
    logits = model.forward(make_batch(tensors, max_query_len=1, max_seq_len=20))
    assert padded.is_decode
    assert logits.shape[0] == num_seqs
    torch.testing.assert_close(logits[:3], expected)
    for layer, old in zip((*cache.k, *cache.v), before, strict=True):
        torch.testing.assert_close(layer, old)  # written again, after a product of other shape


def test_only_one_new_token_a_sequence_with_its_logits_is_a_decode_step():
    inputs = decode_inputs(np.array([[7], [1]], np.int32), [2, 3])
    assert inputs.is_decode
    for name in ("token_ids", "logits_rows"):
        arrays = dict(vars(inputs))
        arrays[name] = arrays[name].repeat([1, 2])
        assert not StepInputs(**arrays).is_decode


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 16, 17, 100, 128, 1000])
def test_every_number_of_sequences_has_a_padded_size_not_far_above_it(max_num_seqs):
    sizes = padded_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        size = min(size for size in sizes if size >= num_seqs)
        assert size < num_seqs + max(16, num_seqs)
        assert size < 2 * num_seqs


def test_packed_arrays_come_back_as_they_were():
    generator = np.random.default_rng(0)
    shapes = [(3,), (0,), (1,), (4, 5), (0, 7), (2, 0), (33,)]
    arrays = [
        generator.integers(-100, 100, shape).astype(dtype)
        for dtype in (np.int64, np.int32)
        for shape in shapes
    ]
    packed = pack(arrays, CPU)
    for tensor, array in zip(unpack(packed.clone(), arrays), arrays, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.data_ptr() % 16 == 0 or not array.size
