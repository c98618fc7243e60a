import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from pagetile import (
    BlockPool,
    BlockTable,
    PagedBatch,
    explain_paged_attention,
    paged_attention,
    plan_paged_attention,
)
from pagetile.device import DeviceInfo
from pagetile.errors import DTypeError, PagetileError, ShapeError, UnsupportedError
from pagetile.ops.paged_attention import make_plan
from pagetile.testing import PagedCase, make_inputs

# 3 new tokens of 2 sequences of 20 and 9 keys, and one sequence of none; blocks of 4 slots.
CASE = PagedCase((2, 1), (20, 9), 4, 2, 16, v_head_size=24, block_size=4, seed=3)


def inputs_with(**changes):
    """The inputs of CASE, with some arguments made by functions of what they were."""
    inputs = make_inputs(CASE)
    fields, options = {}, {**inputs.options, "out": inputs.out[:3]}
    batch = inputs.batch
    for name, change in changes.items():
        if name in vars(batch):
            batch = replace(batch, **{name: change(getattr(batch, name))})
        elif name in options:
            options[name] = change(options[name])
        else:
            fields[name] = change(getattr(inputs, name))
    return inputs.replace(batch=batch, options=options, **fields)


def assert_refused(inputs, error, message, **options):
    """It raises ``error``, a PagetileError, with all of ``message`` in it, and writes nothing."""
    with pytest.raises(error) as raised:
        inputs.attend(**options)
    assert isinstance(raised.value, PagetileError)
    for part in message.split(" | "):
        assert part in str(raised.value)
    out = inputs.options["out"]
    if out is not None and out.is_floating_point():
        assert out.isnan().all()


def test_the_case_is_legal_as_it_stands():
    inputs = inputs_with()
    assert inputs.q.shape[0] == 3
    for impl in ("cpu", "reference", "auto"):
        result = inputs.attend(impl=impl)
        assert result.out is inputs.options["out"]
        assert not result.out.isnan().any()


def exchanged_in_memory(tensor):
    """The same tensor with its last two dimensions exchanged in memory."""
    return tensor.mT.contiguous().mT


def first(size, dim=0):
    return lambda tensor: tensor.narrow(dim, 0, size)


SHAPES = {
    "q of 2 dimensions": ({"q": first(1, 1), "out": lambda out: out[:, 0]}, "out has 2 dimensions"),
    "q without heads": ({"q": lambda q: q[:, 0]}, "q has 2 dimensions [3, 16] | expected 3"),
    "k_cache of 3 dimensions": ({"k_cache": lambda k: k[0]}, "k_cache has 3 dimensions"),
    "keys of another width": ({"k_cache": first(8, 3)}, "k_cache has head_size=8 but q has 16"),
    "fewer value heads": ({"v_cache": first(1, 2)}, "v_cache has num_kv_heads=1 but k_cache has 2"),
    "fewer value blocks": ({"v_cache": first(2)}, "v_cache has num_blocks=2 but k_cache has"),
    "shorter value blocks": (
        {"v_cache": first(3, 1)},
        "v_cache has block_size=3 but k_cache has 4",
    ),
    "short out": ({"out": first(2)}, "out has num_tokens=2 but q has 3"),
    "narrow out": ({"out": first(16, 2)}, "out has v_head_size=16 but v_cache has 24"),
    "out of fewer heads": ({"out": first(3, 1)}, "out has num_heads=3 but q has 4"),
    "tables of fewer sequences": (
        {"block_tables": first(2)},
        "block_tables has num_seqs=2 but seq_lens has 3",
    ),
    "flat tables": ({"block_tables": lambda t: t[0]}, "block_tables has 1 dimension"),
    "fewer lengths": ({"seq_lens": first(2)}, "block_tables has num_seqs=3 but seq_lens has 2"),
    "no last start": (
        {"cu_seqlens_q": first(3)},
        "cu_seqlens_q has 3 entries | expected num_seqs + 1 = 4",
    ),
    "slopes of other heads": (
        {"alibi_slopes": lambda _: torch.ones(2)},
        "alibi_slopes has num_heads=2 but q has 4",
    ),
    "sinks of other heads": (
        {"sinks": lambda _: torch.ones(5)},
        "sinks has num_heads=5 but q has 4",
    ),
    "heads that do not divide": (
        {"q": first(3, 1), "out": first(3, 1)},
        "num_heads=3 | num_kv_heads=2",
    ),
    "no heads": ({"q": first(0, 1), "out": first(0, 1)}, "num_heads=0"),
    "no KV heads": ({"k_cache": first(0, 2), "v_cache": first(0, 2)}, "num_kv_heads=0"),
    "a window of nothing": ({"sliding_window": lambda _: 0}, "sliding_window is 0 | at least 1"),
    "a negative window": ({"sliding_window": lambda _: -1}, "sliding_window is -1"),
    "no cap": (
        {"logits_soft_cap": lambda _: 0.0},
        "logits_soft_cap is 0.0 | a finite number more than 0",
    ),
    "a negative cap": ({"logits_soft_cap": lambda _: -1.0}, "logits_soft_cap is -1.0"),
    "an infinite cap": ({"logits_soft_cap": lambda _: math.inf}, "logits_soft_cap is inf"),
    "a cap of NaN": ({"logits_soft_cap": lambda _: math.nan}, "logits_soft_cap is nan"),
    "a negative bound": ({"max_query_len": lambda _: -1}, "max_query_len is -1"),
    "another negative bound": ({"max_seq_len": lambda _: -5}, "max_seq_len is -5"),
    "a list as a bound": (
        {"max_query_len": lambda _: [5]},
        "max_query_len is [5], expected a Python int",
    ),
    "a bound on a device": ({"max_seq_len": torch.tensor}, "max_seq_len is tensor(20) | .item()"),
    "a window without end": ({"sliding_window": lambda _: 2**70}, "sliding_window is | of 64 bits"),
    "q transposed in memory": (
        {"q": exchanged_in_memory},
        "q has stride 4 in its last dimension | q.contiguous()",
    ),
    "k_cache transposed in memory": (
        {"k_cache": exchanged_in_memory},
        "k_cache has stride 2 in its last dimension",
    ),
    "v_cache transposed in memory": (
        {"v_cache": exchanged_in_memory},
        "v_cache has stride 2 in its last dimension",
    ),
    "out transposed in memory": (
        {"out": exchanged_in_memory},
        "out has stride 4 in its last dimension",
    ),
    "tables transposed in memory": (
        {"block_tables": exchanged_in_memory},
        "block_tables has stride 3 in its last dimension",
    ),
}


@pytest.mark.parametrize(("changes", "message"), SHAPES.values(), ids=SHAPES)
def test_a_wrong_size_is_named(changes, message):
    assert_refused(inputs_with(**changes), ShapeError, message)


@pytest.mark.parametrize("head_size", [4, 12, 520])
def test_a_head_size_is_a_multiple_of_8_up_to_512(head_size):
    inputs = inputs_with(
        q=lambda q: q.new_zeros(3, 4, head_size), k_cache=lambda k: k.new_zeros(9, 4, 2, head_size),
        v_cache=lambda v: v.new_zeros(9, 4, 2, 24),
    )  # fmt: skip
    assert_refused(inputs, ShapeError, f"head_size is {head_size}, expected a multiple of 8")


@pytest.mark.parametrize("block_size", [0, 257])
def test_a_block_has_1_to_256_slots(block_size):
    inputs = inputs_with(
        k_cache=lambda k: k.new_zeros(9, block_size, 2, 16),
        v_cache=lambda v: v.new_zeros(9, block_size, 2, 24),
    )
    assert_refused(inputs, ShapeError, f"block_size={block_size}, expected 1 to 256")


def to(dtype):
    return lambda tensor: torch.zeros(4, dtype=dtype) if tensor is None else tensor.to(dtype)


TYPES = {
    "q": ({"q": to(torch.int8)}, "q is int8, expected float32 or float16 or bfloat16"),
    "k_cache": ({"k_cache": to(torch.int32)}, "k_cache is int32, expected float32"),
    "v_cache": ({"v_cache": to(torch.float16)}, "v_cache is float16, expected float32"),
    "out": ({"out": to(torch.bfloat16)}, "out is bfloat16, expected float32"),
    "block_tables": ({"block_tables": to(torch.int64)}, "block_tables is int64, expected int32"),
    "seq_lens": ({"seq_lens": to(torch.int64)}, "seq_lens is int64, expected int32"),
    "cu_seqlens_q": ({"cu_seqlens_q": to(torch.int64)}, "cu_seqlens_q is int64, expected int32"),
    "alibi_slopes": ({"alibi_slopes": to(torch.int64)}, "alibi_slopes is int64, expected float32"),
    "sinks": ({"sinks": to(torch.int32)}, "sinks is int32, expected float32"),
    "float64 with float32": (
        {"q": to(torch.float64), "out": to(torch.float64)},
        "q is float64 but k_cache is float32",
    ),
}


@pytest.mark.parametrize(("changes", "message"), TYPES.values(), ids=TYPES)
def test_a_wrong_element_type_is_named(changes, message):
    assert_refused(inputs_with(**changes), DTypeError, message)


@pytest.mark.parametrize(
    "name", ["k_cache", "v_cache", "out", "block_tables", "seq_lens", "cu_seqlens_q"]
)
def test_a_tensor_on_another_device_is_named(name):
    inputs = inputs_with(**{name: lambda tensor: tensor.to("meta")})
    with pytest.raises(ShapeError, match=f"{name} is on meta but q is on cpu"):
        inputs.attend()


def put(value, *at):
    def change(tensor):
        tensor = tensor.clone()
        tensor[at] = value
        return tensor

    return change


# The sequences of CASE, the empty one included, in their order.
ORDER = make_inputs(CASE).batch.seq_lens.tolist()
LONG, SHORT, EMPTY = ORDER.index(20), ORDER.index(9), ORDER.index(0)
LAST_BLOCK = len(make_inputs(CASE).k_cache) - 1

VALUES = {
    "an id past the cache": (
        {"block_tables": put(LAST_BLOCK + 1, LONG, 4)},
        f"block_tables[{LONG}, 4] is {LAST_BLOCK + 1}, expected 0 to {LAST_BLOCK} | num_blocks=",
    ),
    "a negative id": (
        {"block_tables": put(-1, SHORT, 2)},
        f"block_tables[{SHORT}, 2] is -1, expected 0 to {LAST_BLOCK}",
    ),
    "a wild id": ({"block_tables": put(-(2**31), LONG, 0)}, f"block_tables[{LONG}, 0] is -2147"),
    "a length of more blocks than a row": (
        {"seq_lens": put(99, SHORT), "max_seq_len": lambda _: 99},
        f"seq_lens[{SHORT}] is 99, 25 blocks of block_size=4 | max_blocks_per_seq=",
    ),
    "a length that enters the tail": (
        {"seq_lens": put(13, SHORT)},
        f"block_tables[{SHORT}, 3] is 2147480000",
    ),
    "a negative length": ({"seq_lens": put(-1, LONG)}, f"seq_lens[{LONG}] is -1, expected 0"),
    "a bound below a length": (
        {"max_seq_len": lambda _: 19},
        f"max_seq_len is 19 but seq_lens[{LONG}] is 20",
    ),
    "a bound below a query": (
        {"max_query_len": lambda _: 1},
        f"max_query_len is 1 but sequence {LONG} has query_len=2",
    ),
    "a first start of 1": ({"cu_seqlens_q": put(1, 0)}, "cu_seqlens_q[0] is 1, expected 0"),
    "a start that goes back": (
        {"cu_seqlens_q": lambda _: torch.tensor([0, 2, 1, 3], dtype=torch.int32)},
        "cu_seqlens_q[2] is 1 but cu_seqlens_q[1] is 2",
    ),
    "an end before the last token": (
        {"cu_seqlens_q": lambda _: torch.tensor([0, 1, 2, 2], dtype=torch.int32)},
        "cu_seqlens_q[3] is 2 but q has num_tokens=3",
    ),
    "an end past the last token": (
        {"cu_seqlens_q": lambda _: torch.tensor([0, 2, 3, 4], dtype=torch.int32)},
        "cu_seqlens_q[3] is 4 but q has num_tokens=3",
    ),
}


@pytest.mark.parametrize(("changes", "message"), VALUES.values(), ids=VALUES)
def test_a_value_that_leads_out_of_a_tensor_is_named(changes, message):
    assert_refused(inputs_with(**changes), ShapeError, message, impl="cpu")


def test_tokens_of_no_sequence_are_an_error():
    inputs = inputs_with(
        block_tables=first(0), seq_lens=first(0), cu_seqlens_q=lambda _: torch.tensor([0]).int()
    )
    assert_refused(inputs, ShapeError, "cu_seqlens_q[0] is 0 but q has num_tokens=3", impl="cpu")


def test_ids_past_the_end_of_a_sequence_are_not_looked_at():
    inputs = inputs_with(block_tables=put(-7, EMPTY, slice(None)))
    assert not inputs.attend(impl="cpu").out.isnan().any()


def test_an_unknown_implementation_is_named():
    message = (
        "impl is 'cuda', expected 'auto' or one of hopper, hopper_prefill, triton, cpu, reference"
    )
    assert_refused(inputs_with(), UnsupportedError, message, impl="cuda")


def test_a_named_implementation_never_falls_back():
    doubles = dict.fromkeys(("q", "k_cache", "v_cache", "out"), to(torch.float64))
    message = "cpu cannot run this: q is float64 | impl='auto'"
    assert_refused(inputs_with(**doubles), UnsupportedError, message, impl="cpu")
    inputs = inputs_with(**doubles)
    assert inputs.attend().out.dtype == torch.float64


def test_explain_gives_each_implementations_reason():
    inputs = inputs_with()
    arguments = inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch
    lines = explain_paged_attention(*arguments, **inputs.options).splitlines()
    elsewhere = [
        f"{name}: no, the tensors are on cpu" for name in ("hopper", "hopper_prefill", "triton")
    ]
    assert lines == [*elsewhere, "cpu: yes", "reference: yes"]
    doubles = (tensor.double() for tensor in arguments[:3])
    lines = explain_paged_attention(*doubles, inputs.batch, causal=False).splitlines()
    assert re.match("cpu: no, q is float64", lines[3])
    assert lines[4] == "reference: yes"


def test_explain_checks_as_a_call_does():
    inputs = inputs_with(k_cache=first(8, 3))
    arguments = inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch
    with pytest.raises(ShapeError, match="k_cache has head_size=8 but q has 16"):
        explain_paged_attention(*arguments)


def test_a_gpu_s_values_are_checked_on_the_host_when_debugging():
    from pagetile.ops.paged_attention.api import check_on_host

    inputs = inputs_with()
    check_on_host(inputs.problem, inputs.batch, inputs.k_cache.shape[0])
    with pytest.raises(ShapeError, match=r"block_tables\[\d, 0\] is \d, expected 0 to 0"):
        check_on_host(inputs.problem, inputs.batch, 1)
    longer = replace(inputs.batch, max_seq_len=1)
    with pytest.raises(ShapeError, match="max_seq_len is 1 but seq_lens"):
        check_on_host(replace(inputs.problem, max_seq_len=1), longer, inputs.k_cache.shape[0])


@pytest.mark.parametrize(
    "name",
    ["q", "k_cache", "v_cache", "block_tables", "seq_lens", "cu_seqlens_q", "out"],
)
def test_an_argument_that_is_no_tensor_is_named(name):
    with pytest.raises(DTypeError, match=f"{name} is of type list, expected a torch.Tensor"):
        inputs_with(**{name: lambda _: [1, 2]}).attend()
    if name != "out":
        with pytest.raises(DTypeError, match=f"{name} is of type NoneType"):
            inputs_with(**{name: lambda _: None}).attend()


def test_an_argument_that_is_no_batch_is_named():
    with pytest.raises(DTypeError, match="batch is of type tuple, expected a PagedBatch"):
        paged_attention(torch.zeros(1, 2, 8), torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), ())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"causal": "no"}, DTypeError, "causal is 'no', expected True or False"),
        ({"softmax_scale": "1"}, DTypeError, "softmax_scale is '1', expected a number"),
        ({"softmax_scale": math.nan}, ShapeError, "softmax_scale is nan, expected a finite number"),
        ({"softmax_scale": math.inf}, ShapeError, "softmax_scale is inf, expected a finite number"),
        ({"sliding_window": 4.0}, ShapeError, "sliding_window is 4.0, expected at least 1"),
        ({"alibi_slopes": [1.0] * 4}, DTypeError, "alibi_slopes is of type list"),
        ({"k_scale": 1.0}, DTypeError, "k_scale is of type float"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_whatever_was_asked_before(options, error, message):
    inputs = make_inputs(CASE)
    call = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch)
    paged_attention(*call, sliding_window=4)  # what is equal to 4 is not what 4 is
    with pytest.raises(error, match=message):
        paged_attention(*call, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax_scale": [1]}, r"softmax_scale is \[1\], expected a number"),
        ({"softmax_scale": 10**309}, "softmax_scale is 1000.*, expected a number"),
        ({"softmax_scale": "a"}, "softmax_scale is 'a', expected a number"),
        ({"logits_soft_cap": "a"}, "logits_soft_cap is 'a', expected a number"),
        ({"logits_soft_cap": [1]}, r"logits_soft_cap is \[1\], expected a number"),
        ({"impl": ["cpu"]}, r"impl is \['cpu'\], expected a name"),
        ({"plan": 3}, "plan is 3, expected one that plan_paged_attention made"),
        ({"plan": {}}, "plan is {}, expected one that plan_paged_attention made"),
        ({"causal": 1}, "causal is 1, expected True or False"),
    ],
    ids=str,
)
def test_an_unknown_option_is_named(options, message):
    inputs = make_inputs(CASE)
    call = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch)
    paged_attention(*call, causal=True)  # 1 is equal to it
    with pytest.raises(DTypeError, match=message):
        paged_attention(*call, **options)


def test_a_plan_of_a_call_is_that_of_its_problem():
    inputs = make_inputs(CASE)
    call = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch)
    plan = plan_paged_attention(*call, sliding_window=4, batch_invariant=True)
    assert plan == make_plan(inputs.problem, DeviceInfo.of(inputs.q.device), batch_invariant=True)
    assert paged_attention(*call, plan=plan).out.shape == inputs.out.shape
    with pytest.raises(DTypeError, match="batch is of type int"):
        plan_paged_attention(*call[:3], 5)
    with pytest.raises(TypeError, match="num_splits is not an option of paged_attention"):
        plan_paged_attention(*call, num_splits=4)


def test_the_reference_is_not_planned():
    inputs = make_inputs(CASE)
    call = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch)
    with pytest.raises(UnsupportedError, match="the reference runs this, which is not planned"):
        plan_paged_attention(*call, impl="reference")


def test_a_plan_is_for_one_kind_of_device():
    inputs = make_inputs(CASE)
    call = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch)
    gpu = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))
    with pytest.raises(DTypeError, match="plan is a GpuPlan, but cpu runs this"):
        paged_attention(*call, plan=make_plan(inputs.problem, gpu))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": None}, "batch is of type NoneType, expected a PagedBatch"),
        ({"q": np.zeros(3)}, "q is of type ndarray"),
        ({"sinks": [1.0]}, "sinks is of type list"),
    ],
    ids=["batch", "q", "sinks"],
)
def test_explaining_names_what_calling_names(changes, message):
    inputs = make_inputs(CASE)
    names = ("q", "k_cache", "v_cache", "batch")
    arguments = {name: getattr(inputs, name) for name in names} | changes
    for call in (paged_attention, explain_paged_attention):
        with pytest.raises(DTypeError, match=message):
            call(**arguments)


def test_a_batch_of_lists_is_that_of_tensors():
    batch = PagedBatch.of([[7], [2, 5], []], [3, 6, 0], [3, 1, 0])
    assert batch.block_tables[0, :1].tolist() == [7]
    assert batch.block_tables[1].tolist() == [2, 5]
    assert batch.seq_lens.tolist() == [3, 6, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 4]
    assert (batch.max_query_len, batch.max_seq_len) == (3, 6)
    tensors = (batch.block_tables, batch.seq_lens, batch.cu_seqlens_q)
    assert {tensor.dtype for tensor in tensors} == {torch.int32}
    assert PagedBatch.of([[1], [0]], [2, 1]).cu_seqlens_q.tolist() == [0, 1, 2]


@pytest.mark.parametrize("num_seqs", [0, 2])
def test_a_batch_of_nothing_gives_nothing(num_seqs):
    batch = PagedBatch.of([[]] * num_seqs, [0] * num_seqs, [0] * num_seqs)
    cache = torch.zeros(1, 4, 2, 8)
    assert paged_attention(torch.zeros(0, 2, 8), cache, cache, batch).out.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], [2, 3]), "blocks are of 1 sequences, seq_lens of 2 and query_lens of 2"),
        (([[1], [2]], [2, 3], [1]), "and query_lens of 1: expected as many of each"),
        (([[1], [2]], [2, 3], [2, 4]), "sequence 1 has 4 new tokens and 3 keys.*included"),
        (([[1]], [2], [-1]), r"query_lens\[0\] is -1, expected 0 or more tokens"),
        (([[1]], [-2]), r"seq_lens\[0\] is -2, expected 0 or more tokens"),
    ],
    ids=str,
)
def test_lists_that_make_no_batch_are_named(arguments, message):
    with pytest.raises(ShapeError, match=message):
        PagedBatch.of(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, [1]), "blocks is int, expected a list of block tables, one for each sequence"),
        (([b"abcd"], [1]), r"blocks\[0\] is of type bytes, expected a list of 32-bit integers"),
        (([5], [1]), r"blocks\[0\] is 5, expected .*: pass table.blocks for each sequence"),
        (([[1], [2.0]], [1, 1]), r"blocks\[1\] is \[2.0\], .*'float' object"),
        (([[1 << 31]], [1]), r"blocks\[0\] is \[2147483648\], expected .* 32-bit integers"),
        (([BlockTable(BlockPool(1, 16))], [0]), r"blocks\[0\] is of type BlockTable.*table.blocks"),
        (([[1]], None), "seq_lens is of type NoneType, expected a list"),
        (([[1]], [1.5]), r"seq_lens is \[1.5\], expected a list of 32-bit integers"),
        (([[1]], [1], 1), "query_lens is 1, expected a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lists_of_something_else_are_named(arguments, message):
    with pytest.raises(DTypeError, match=message):
        PagedBatch.of(*arguments)
    with pytest.raises(DTypeError, match="block_tables is of type list"):
        PagedBatch.decode([[1]], [1], 1)


def test_a_table_that_is_too_short_for_its_sequence_is_named():
    """Beside one that is longer: it must not read another sequence's block."""
    k_cache, v_cache = torch.randn(2, 8, 16, 2, 64)
    batch = PagedBatch.of([[1, 2], [3]], [20, 17])
    with pytest.raises(
        ShapeError,
        match=r"block_tables\[1, 1\] is -1, expected 0 to 7.*has 1 block, .* 17, which takes 2",
    ):
        paged_attention(torch.randn(2, 4, 64), k_cache, v_cache, batch)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 10, 16, 2, 64), r"k_cache has 5 dimensions .*: pass k_cache, v_cache = .*unbind\(0\)"),
        ((10, 2, 16, 2, 64), r"k_cache has 5 dimensions .*: pass k_cache, v_cache = .*unbind\(1\)"),
        ((10, 3, 16, 16, 4), r"k_cache has 5 dimensions .*; pagetile.integrations.vllm_ops"),
        ((10, 2, 16, 64), r"num_kv_heads=16. If the caches are .*pass k_cache.transpose\(1, 2\)"),
        ((0, 16, 2, 64), "a block of k_cache, which has num_blocks=0"),
    ],
    ids=["vLLM's", "FlashInfer's", "packed", "heads first", "no blocks"],
)
def test_a_cache_in_another_layout_is_named_with_the_conversion(shape, message):
    cache = torch.zeros(shape)
    with pytest.raises(ShapeError, match=message):
        paged_attention(torch.zeros(1, 8, 64), cache, cache, PagedBatch.of([[0]], [1]))


def test_an_element_type_is_named_with_the_conversion():
    cache, batch = torch.zeros(1, 16, 2, 64, dtype=torch.uint8), PagedBatch.of([[0]], [1])
    q = torch.zeros(1, 8, 64)
    with pytest.raises(DTypeError, match=r"k_cache\.view\(torch\.float8_e4m3fn\)"):
        paged_attention(q, cache, cache, batch)
    with pytest.raises(DTypeError, match=r"v_cache\.to\(torch\.float32\)"):
        paged_attention(q, cache.float(), cache.half(), batch)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.zeros((1, 8, 64), np.float32), r"pass torch.from_numpy\(q\)"),
        ([torch.zeros(8, 64)], r"pass one of its tensors, such as q\[0\], or torch.stack\(q\)"),
        ([[0.0]], r"pass torch.tensor\(q\)"),
    ],
    ids=["array", "tensors", "numbers"],
)
def test_what_is_no_tensor_is_named_with_the_conversion(value, hint):
    cache, batch = torch.zeros(1, 16, 2, 64), PagedBatch.of([[0]], [1])
    with pytest.raises(DTypeError, match=f"q is of type .*, expected a torch.Tensor: {hint}"):
        paged_attention(value, cache, cache, batch)


@pytest.mark.parametrize(
    ("rows", "bounds", "message"),
    [
        (3, (1, 20), "q has num_tokens=3: give q one row for each new token of the batch"),
        (2, (1, 5), r"max_seq_len is 5 but seq_lens\[0\] is 20: give the largest of seq_lens"),
        (2, (0, 20), "max_query_len is 0 .* Give the largest query_len, or more"),
    ],
    ids=["rows", "keys", "queries"],
)
def test_a_value_that_is_out_of_bounds_comes_with_what_to_do(rows, bounds, message):
    batch = PagedBatch.of([[0, 1], [2, 3]], [20, 17])
    batch = replace(batch, max_query_len=bounds[0], max_seq_len=bounds[1])
    cache, out = torch.zeros(4, 16, 2, 64), torch.full((rows, 8, 64), 7.0)
    with pytest.raises(ShapeError, match=message):
        paged_attention(torch.zeros(rows, 8, 64), cache, cache, batch, out=out)
    assert (out == 7).all()


def test_lists_may_be_tensors_and_arrays():
    batch = PagedBatch.of(np.array([[1, 2], [3, 4]]), torch.tensor([20, 17]))
    assert (batch.block_tables.tolist(), batch.max_seq_len) == ([[1, 2], [3, 4]], 20)
    assert type(batch.max_seq_len) is int


VALUES = {
    "a block out of the pool": ({"block_tables": lambda t: t + 1000}, "block_tables["),
    "a block before the first": ({"block_tables": lambda t: t - 1000}, "block_tables["),
    "a negative length": ({"seq_lens": lambda s: -s}, "expected 0 or more"),
    "a length beyond the bound": ({"seq_lens": lambda s: s * 40}, "max_seq_len is"),
    "starts in disorder": ({"cu_seqlens_q": lambda s: s.flip(0)}, "cu_seqlens_q[0] is 3"),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_reference_checks_values_as_other_implementations_do(name):
    """It wrapped negative ids around, and took as many keys as the table had."""
    changes, message = VALUES[name]
    messages = set()
    for impl in ("reference", "cpu"):
        with pytest.raises(ShapeError) as raised:
            inputs_with(**changes).attend(impl=impl)
        assert message in str(raised.value)
        messages.add(str(raised.value))
    assert len(messages) == 1
