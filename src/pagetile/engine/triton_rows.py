"""How sampling kernels read a row: its logits after penalties, and floats in order.

A row's counts, biases and allowed tokens are read from the addresses that lie in the row, so rows
without them cost a load each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import sampling_rows as columns
from .sampling_tables import NUM_TABLES as TABLES

NUM_INTS = tl.constexpr(columns.NUM_INTS)
NUM_FLOATS = tl.constexpr(columns.NUM_FLOATS)
NUM_TABLES = tl.constexpr(TABLES)
PROMPT_LEN = tl.constexpr(columns.PROMPT_LEN)
TOP_K = tl.constexpr(columns.TOP_K)
MIN_TOKENS = tl.constexpr(columns.MIN_TOKENS)
NUM_LOGPROBS = tl.constexpr(columns.NUM_LOGPROBS)
INVERSE = tl.constexpr(columns.INVERSE)
TEMPERATURE = tl.constexpr(columns.TEMPERATURE)
TAIL = tl.constexpr(columns.TAIL)
MARGIN = tl.constexpr(columns.MARGIN)
REPETITION = tl.constexpr(columns.REPETITION)
INVERSE_REPETITION = tl.constexpr(columns.INVERSE_REPETITION)
PRESENCE = tl.constexpr(columns.PRESENCE)
FREQUENCY = tl.constexpr(columns.FREQUENCY)


@triton.jit
def order_of(x):
    """Integers that ascend as float32 values do, equal for equal ones: -0.0 is 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order(order):
    """The float32 value of an int32 order."""
    bits = order ^ ((order >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def position_of(row, lengths, ints):
    """How many tokens a row has drawn."""
    return tl.load(lengths + row) - tl.load(ints + row * NUM_INTS + PROMPT_LEN)


@triton.jit
def has_cut(row, ints, floats, vocab_size):
    """Whether a row asks for top_k, top_p or min_p."""
    top_k = tl.load(ints + row * NUM_INTS + TOP_K)
    numbers = floats + row * NUM_FLOATS
    has_margin = tl.load(numbers + MARGIN) > -float("inf")
    return (top_k < vocab_size) | (tl.load(numbers + TAIL) > 0) | has_margin


@triton.jit
def advance(row, token, last_tokens, lengths, addresses):
    """Give a row its token, int64."""
    tl.store(last_tokens + row, token)
    tl.store(lengths + row, tl.load(lengths + row) + 1)
    counts = tl.load(addresses + row * NUM_TABLES)
    if counts != 0:
        count = counts.to(tl.pointer_type(tl.int32)) + token
        tl.store(count, tl.load(count) + 2)


@triton.jit
def _mix(x, key):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += key
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_keys(row, position, ints):
    """The two words that a row's noise at a position depends on."""
    shift = position.to(tl.uint32)
    first = _mix(tl.load(ints + row * NUM_INTS).to(tl.uint32) + shift * 0x9E3779B9, 0)
    key = tl.load(ints + row * NUM_INTS + 1).to(tl.uint32)
    return first, _mix((key ^ first) + shift * 0x85EBCA6B, 0)


@triton.jit
def noise_words(at, first, second):
    """Random bits of tokens, uint32."""
    return _mix(at.to(tl.uint32) + first, second)


@triton.jit
def noise_of(words):
    """Exponential noise of random bits, float32."""
    u = ((words & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    u = tl.minimum(u, 1.0 - 1.0 / 16777216.0)
    # log(1 - u) loses the digits of a small u, and the smallest noise wins.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.0625, series, -tl.log(1.0 - u))


@triton.jit
def make_noise(at, row, position, ints):
    """Exponential noise of tokens, float32: ``torch_draw.make_noise`` but for the logarithm."""
    first, second = noise_keys(row, position, ints)
    return noise_of(noise_words(at, first, second))


@triton.jit
def load_logits(at, is_token, i, logits, stride):
    """The model's logits at tokens ``at``, float32; -inf past the vocabulary."""
    x = tl.load(logits + i.to(tl.int64) * stride + at, mask=is_token, other=-float("inf"))
    return x.to(tl.float32)


@triton.jit
def _ban(x, words, at, is_token):
    """Subtract infinity where a token's bit is 0: a NaN stays to be found."""
    word = tl.load(words + (at >> 5), mask=is_token, other=-1)
    return x - tl.where(((word >> (at & 31)) & 1) != 0, 0.0, float("inf"))


@triton.jit
def shape_logits(
    x,
    at,
    is_token,
    i,
    row,
    position,
    ints,  # int32 [num_rows, NUM_INTS]
    floats,  # float64 [num_rows, NUM_FLOATS]
    addresses,  # int64 [num_rows, NUM_TABLES]
    step_masks,  # int32 [n, num_words], or None
    num_words,
):
    """Add a row's biases, penalise its counted tokens and rule out those that are not allowed.

    ``torch_shape.py`` says the same in torch.
    """
    tables = addresses + row * NUM_TABLES
    bias = tl.load(tables + 1)
    if bias != 0:
        biases = tl.multiple_of(bias.to(tl.pointer_type(tl.float32)), 16)
        x += tl.load(biases + at, mask=is_token, other=0.0)
    counted = tl.load(tables)
    if counted != 0:
        counts = tl.multiple_of(counted.to(tl.pointer_type(tl.int32)), 16)
        count = tl.load(counts + at, mask=is_token, other=0)
        numbers = floats + row * NUM_FLOATS
        repetition = tl.load(numbers + REPETITION)
        wide = x.to(tl.float64)
        if repetition != 1.0:
            scale = tl.where(x > 0, tl.load(numbers + INVERSE_REPETITION), repetition)
            wide = tl.where(count > 0, wide * scale, wide)
        drawn = count >> 1
        present = tl.where(drawn > 0, tl.load(numbers + PRESENCE), 0.0)
        wide -= present + tl.load(numbers + FREQUENCY) * drawn.to(tl.float64)
        x = wide.to(tl.float32)
    allowed = tl.load(tables + 2)
    if allowed != 0:
        words = allowed.to(tl.pointer_type(tl.int32))
        if position >= tl.load(ints + row * NUM_INTS + MIN_TOKENS):
            words += num_words
        x = _ban(x, words, at, is_token)
    if step_masks is not None:
        x = _ban(x, step_masks + i.to(tl.int64) * num_words, at, is_token)
    return x
