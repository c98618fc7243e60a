from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import FAMILIES, REFUSED, tiny_config, tiny_model

from pagetile.analysis.checkpoint import ELEMENT_BYTES, layer_kinds, read_checkpoint, weight_bytes
from pagetile.analysis.lengths import (
    GeometricLengths,
    GivenLengths,
    LengthDistribution,
    UniformLengths,
    parse_lengths,
)
from pagetile.analysis.memory import LayerKind, format_bytes, parse_bytes, plan_memory
from pagetile.errors import OutOfBlocksError, RequestError, ShapeError, UnsupportedError
from pagetile.models import load_model

GIB = 2**30
LLAMA_8B = LayerKind("full attention", 32, 32, 8, 128, 128)
GEMMA = [
    LayerKind("sliding window", 13, 8, 4, 256, 256, sliding_window=4096),
    LayerKind("full attention", 13, 8, 4, 256, 256),
]
GPT2 = LayerKind("full attention", 12, 12, 12, 64, 64)


# --- plans by hand --------------------------------------------------------------------------


def test_llama_8b_by_hand():
    plan = plan_memory([LLAMA_8B], memory_bytes=31 * GIB, weight_bytes=15 * GIB, max_model_len=8192)
    assert plan.bytes_per_token == 131_072  # 32 layers, 8 heads, 2 x 128 numbers of 2 bytes
    assert plan.block_bytes == 2 * 2**20
    assert plan.cache_bytes == 16 * GIB
    assert plan.num_blocks == 8192
    assert plan.num_tokens == 131_072
    assert plan.num_full_sequences == 16
    assert plan.visible_bytes(8192) == 8192 * 131_072


def test_alternating_windows_by_hand():
    plan = plan_memory(GEMMA, memory_bytes=10**9, max_model_len=8192)
    assert plan.bytes_per_token == 106_496  # 26 layers, 4 heads, 2 x 256 numbers of 2 bytes
    assert plan.num_blocks == 10**9 // (16 * 106_496) == 586
    assert plan.num_full_sequences == 1  # 512 blocks each
    assert plan.visible_bytes(4096) == 4096 * 106_496
    assert plan.visible_bytes(8192) == (4096 + 8192) * 53_248


def test_gpt2_in_float32_by_hand():
    plan = plan_memory([GPT2], memory_bytes=GIB, element_bytes=4, block_size=10, max_model_len=1024)
    assert plan.bytes_per_token == 73_728  # 12 layers, 12 heads, 2 x 64 numbers of 4 bytes
    assert plan.num_blocks == 1456
    assert plan.num_full_sequences == 14  # 103 blocks each, the last with 6 slots left over


def test_shared_layers_keep_nothing():
    shared = LayerKind("full attention", 15, 8, 2, 256, 256, is_shared=True)
    owner = LayerKind("full attention", 20, 8, 2, 256, 256)
    plan = plan_memory([owner, shared], memory_bytes=GIB, max_model_len=64)
    assert plan.bytes_per_token == 20 * 2 * 512 * 2


def test_keys_and_values_of_different_width():
    latent = LayerKind("full attention", 2, 16, 16, 192, 128)
    plan = plan_memory([latent], memory_bytes=GIB, max_model_len=64)
    assert plan.bytes_per_token == 2 * 16 * (192 + 128) * 2


def test_too_little_memory_says_what_is_missing():
    with pytest.raises(OutOfBlocksError, match=r"weights take 2 GiB.*so 1 GiB are missing"):
        plan_memory([LLAMA_8B], memory_bytes=GIB, weight_bytes=2 * GIB, max_model_len=64)


@pytest.mark.parametrize("options", [{"block_size": 0}, {"block_size": 257}, {"max_model_len": 0}])
def test_sizes_out_of_range(options):
    with pytest.raises(ShapeError):
        plan_memory([GPT2], **{"memory_bytes": GIB, "max_model_len": 64, **options})


# --- occupancy ------------------------------------------------------------------------------


def test_occupancy_by_hand():
    one_byte = LayerKind("full attention", 1, 1, 1, 8, 8)
    plan = plan_memory(
        [one_byte], memory_bytes=16 * 100, element_bytes=1, block_size=4, max_model_len=10
    )
    assert plan.num_blocks == 25
    result = plan.occupancy(GivenLengths((1, 4, 10)))  # 1, 1 and 3 blocks; 3, 0 and 2 unused
    assert result.num_sequences == 25 / (5 / 3)
    assert result.num_unused == pytest.approx(5 / 3)
    assert result.waste == pytest.approx(5 / 20)
    assert result.num_reserved == 10
    assert result.reserved_waste == pytest.approx(1 - 5 / 10)


def test_lengths_beyond_the_model_are_refused():
    plan = plan_memory([GPT2], memory_bytes=GIB, max_model_len=64)
    with pytest.raises(RequestError, match="65 is more than max_model_len=64"):
        plan.occupancy(GivenLengths((3, 65)))


def _expect(probabilities: dict[int, float], block_size: int) -> tuple[float, float]:
    mean = sum(length * p for length, p in probabilities.items())
    return mean, sum(-(-length // block_size) * p for length, p in probabilities.items())


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 40))
def test_uniform_lengths_against_their_sum(shortest, more, block_size):
    lengths = UniformLengths(shortest, shortest + more)
    each = dict.fromkeys(range(shortest, shortest + more + 1), 1 / (more + 1))
    assert (lengths.mean, lengths.mean_blocks(block_size)) == pytest.approx(
        _expect(each, block_size)
    )


@settings(deadline=None, max_examples=50)
@given(st.floats(1, 500), st.integers(1, 300), st.integers(1, 40))
def test_geometric_lengths_against_their_sum(mean, longest, block_size):
    p = 1 / mean
    each = {length: p * (1 - p) ** (length - 1) for length in range(1, longest)}
    each[longest] = (1 - p) ** (longest - 1)
    lengths = GeometricLengths(mean, longest)
    assert (lengths.mean, lengths.mean_blocks(block_size)) == pytest.approx(
        _expect(each, block_size)
    )


@settings(deadline=None, max_examples=50)
@given(st.floats(1, 1e18), st.integers(1, 10**7), st.integers(1, 256))
def test_pages_never_hold_fewer_sequences_than_reservations(mean, longest, block_size):
    plan = plan_memory([LLAMA_8B], memory_bytes=2**60, block_size=block_size, max_model_len=longest)
    result = plan.occupancy(GeometricLengths(mean, longest))
    per_block = -(-longest // block_size) * block_size / longest  # a reservation has no last block
    assert result.num_sequences * per_block >= result.num_reserved * (1 - 1e-9)
    assert -1e-9 <= result.num_unused < block_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100,250, 900", GivenLengths((100, 250, 900))),
        ("7", GivenLengths((7,))),
        ("1-2048", UniformLengths(1, 2048)),
    ],
)
def test_lengths_as_written(text: str, expected: LengthDistribution):
    assert parse_lengths(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1,,2", "0", "-5", "5-1", "0-3", "1-2-3", "1.5", "9,-1"])
def test_lengths_that_are_none(text):
    with pytest.raises(RequestError, match="expected"):
        parse_lengths(text)


@pytest.mark.parametrize("mean", [0, 0.5, -3, float("nan"), float("inf")])
def test_means_that_are_none(mean):
    with pytest.raises(RequestError, match="mean length"):
        GeometricLengths(mean, 10)


# --- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * GIB),
        ("16 gib", 16 * GIB),
        ("16Gi", 16 * GIB),
        ("512MB", 512 * 10**6),
        ("1.5G", 1_500_000_000),
        ("2T", 2 * 10**12),
        ("0.1KiB", 102),
        ("4096", 4096),
        ("4096B", 4096),
        (" 80GB ", 80 * 10**9),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "x", "-1GiB", "16QB", "1e9", "nan", "0", "0.1", "5i", "1,5G", "٣GB"]
)
def test_sizes_that_are_none(text):
    with pytest.raises(RequestError, match="is not a memory size"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_a_formatted_size_is_near(size):
    text = format_bytes(size)
    if size >= 1024:
        assert parse_bytes(text) == pytest.approx(size, rel=6e-3)


# --- checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_the_config_are_those_of_the_loaded_model(family):
    model = tiny_model(family)
    loaded = sorted(
        (spec.num_kv_heads, spec.head_size, spec.v_head_size, spec.sliding_window or 0)
        for spec in load_model(model).layers
    )
    kinds = [kind for kind in layer_kinds(model.config) if not kind.is_shared]
    told = itertools.chain.from_iterable(
        [(kind.num_kv_heads, kind.head_size, kind.v_head_size, kind.sliding_window or 0)]
        * kind.num_layers
        for kind in kinds
    )
    assert sorted(told) == loaded


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_do_not_run_are_refused(family, tmp_path):
    tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="cannot run on a paged cache"):
        read_checkpoint(tmp_path)


def test_shared_and_latent_layers_of_a_config(tmp_path):
    _write(tmp_path, model_type="gemma3n_text")
    kinds = read_checkpoint(tmp_path).layers
    assert [(kind.num_layers, kind.sliding_window, kind.is_shared) for kind in kinds] == [
        (16, 512, False),
        (4, None, False),
        (12, 512, True),
        (3, None, True),
    ]
    _write(tmp_path, model_type="deepseek_v3")
    [kind] = read_checkpoint(tmp_path).layers
    assert (kind.num_layers, kind.num_kv_heads, kind.head_size, kind.v_head_size) == (
        61,
        128,
        192,
        128,
    )


def test_weights_are_counted_as_they_will_be_loaded(tmp_path):
    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, 2) == 15 * 2 + 56
    assert weight_bytes(tmp_path, 4) == 15 * 4 + 56


def test_weights_in_several_files_are_counted_once(tmp_path):
    for name in ("one", "two", "stray"):
        save_file({name: torch.zeros(10)}, tmp_path / f"{name}.safetensors")
    index = {
        "weight_map": {"one": "one.safetensors", "o": "one.safetensors", "t": "two.safetensors"}
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes(tmp_path, 4) == 80
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(RequestError, match=r"two\.safetensors is missing"):
        weight_bytes(tmp_path, 4)


def test_no_weights_are_not_zero_weights(tmp_path):
    assert weight_bytes(tmp_path, 2) is None


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x05" + bytes(7) + b"{....", b"\x02" + bytes(7) + b"[]"]
)
def test_broken_weight_files(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RequestError, match="is not a safetensors file, or cut short"):
        weight_bytes(tmp_path, 2)


@pytest.mark.parametrize(
    "config",
    [
        "",
        "[1]",
        "{}",
        '{"model_type": "nope"}',
        '{"model_type": "llama", "num_hidden_layers": "x"}',
    ],
)
def test_broken_configs(config, tmp_path):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(RequestError, match=r"config\.json "):
        read_checkpoint(tmp_path)


def test_a_directory_without_config(tmp_path):
    with pytest.raises(RequestError, match=r"no config\.json"):
        read_checkpoint(tmp_path)


def test_types_and_positions_of_a_checkpoint(tmp_path):
    _write(tmp_path, model_type="llama", torch_dtype="float16", max_position_embeddings=77)
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.dtype, checkpoint.max_model_len, checkpoint.weight_bytes) == (
        "float16",
        77,
        None,
    )
    assert read_checkpoint(tmp_path, dtype="float32", max_model_len=50).max_model_len == 50
    with pytest.raises(RequestError, match="77 positions"):
        read_checkpoint(tmp_path, max_model_len=78)
    with pytest.raises(RequestError, match="expected float32"):
        read_checkpoint(tmp_path, dtype="int8")
    assert set(ELEMENT_BYTES) == {"float32", "float16", "bfloat16"}


def _write(directory: Path, **config: object) -> None:
    (directory / "config.json").write_text(json.dumps(config))
