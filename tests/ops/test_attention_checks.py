"""Every wrong argument of attention is named, with its value, the expected one and a remedy."""

import pytest
import torch

from pagetile import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    attention,
    attention_scores,
    explain_attention,
    merge_states,
    window_attention,
    write_kv,
)

Q, KV = torch.zeros(2, 5, 4, 16), torch.zeros(2, 7, 2, 16)
RQ, RKV = torch.zeros(9, 4, 16), torch.zeros(12, 2, 16)


def starts(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


RAGGED = {"cu_seqlens_q": starts(0, 4, 9), "cu_seqlens_k": starts(0, 5, 12)}

WRONG = [
    ((RQ, RKV, RKV), {}, r"q has 3 dimensions.*cu_seqlens_q is None.*\[batch query_len"),
    ((Q, KV[..., :8], KV), {}, "k has head_size=8 but q has 16"),
    ((Q, KV, KV[:, :3]), {}, "v has seq_len=3 but k has 7"),
    ((Q, KV[:1], KV[:1]), {}, "k has batch=1 but q has 2"),
    ((Q, KV, KV[:, :, :1]), {}, "v has num_kv_heads=1 but k has 2"),
    ((Q[:, :, :3], KV, KV), {}, r"q has num_heads=3, expected a multiple of k's num_kv_heads=2"),
    (
        (Q[..., :12], KV[..., :12], KV),
        {},
        "head_size is 12, expected a multiple of 8 from 8 to 512",
    ),
    ((Q, KV, KV[..., :4]), {}, "v_head_size is 4, expected a multiple of 8"),
    ((Q, KV.mT.contiguous().mT, KV), {}, r"k has stride 2 in its last.*pass k.contiguous\(\)"),
    ((Q, KV, KV), {"sliding_window": 0}, "sliding_window is 0, expected at least 1"),
    ((Q, KV, KV), {"sliding_window": 4.0}, "sliding_window is 4.0, expected at least 1"),
    ((Q, KV, KV), {"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0, expected a finite number"),
    ((Q, KV, KV), {"alibi_slopes": torch.zeros(3)}, "alibi_slopes has num_heads=3 but q has 4"),
    ((Q, KV, KV), {"sinks": torch.zeros(2, 2)}, "sinks has 2 dimensions"),
    ((Q, KV, KV), {"max_seq_len": 7}, "max_seq_len is given but cu_seqlens_q is None"),
    ((Q, KV, KV), {"cu_seqlens_k": starts(0, 7)}, "cu_seqlens_k is given but cu_seqlens_q is None"),
    ((Q, KV, KV), RAGGED, "q has 4 dimensions"),
    ((RQ, RKV, RKV), {**RAGGED, "cu_seqlens_k": starts(0, 12)}, "cu_seqlens_k has length=2 but"),
    ((RQ, RKV, RKV), {"cu_seqlens_q": starts()}, "cu_seqlens_q is empty"),
    (
        (RQ, RKV, RKV),
        {**RAGGED, "max_query_len": -1},
        "max_query_len is -1, expected an int",
    ),
    ((RQ, RKV, RKV), {**RAGGED, "max_query_len": 4}, "max_query_len is 4 but sequence 1 has 5"),
    ((RQ, RKV, RKV), {**RAGGED, "max_seq_len": 6}, "max_seq_len is 6 but sequence 1 has 7"),
    (
        (RQ, RKV, RKV),
        {**RAGGED, "cu_seqlens_q": starts(1, 4, 9)},
        r"cu_seqlens_q\[0\] is 1, expected 0",
    ),
    (
        (RQ, RKV, RKV),
        {**RAGGED, "cu_seqlens_k": starts(0, 13, 12)},
        r"cu_seqlens_k\[2\] is 12 but cu_seqlens_k\[1\] is 13|max_seq_len is 12 but sequence 0",
    ),
    (
        (RQ, RKV, RKV),
        {**RAGGED, "cu_seqlens_q": starts(0, 4, 8)},
        "cu_seqlens_q ends with 8 but q has 9 rows",
    ),
    ((RQ, RKV, RKV), {"cu_seqlens_q": starts(0, 4, 9)}, "cu_seqlens_k ends with 9 but k has 12"),
]


@pytest.mark.parametrize(("tensors", "options", "message"), WRONG, ids=lambda x: None)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_wrong_sizes_are_named(tensors, options, message, impl):
    with pytest.raises(ShapeError, match=message):
        attention(*tensors, **options, impl=impl)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((Q.long(), KV, KV), {}, "q is int64, expected float32 or float16 or bfloat16 or float64"),
        ((Q, KV.half(), KV), {}, "k is float16, expected float32"),
        ((Q, KV, KV.bfloat16()), {}, "v is bfloat16, expected float32"),
        ((Q, KV, KV), {"sinks": torch.zeros(4).long()}, "sinks is int64"),
        (
            (RQ, RKV, RKV),
            {**RAGGED, "cu_seqlens_k": starts(0, 5, 12, dtype=torch.int64)},
            "cu_seqlens_k is int64, expected int32",
        ),
    ],
    ids=lambda x: None,
)
def test_wrong_types_are_named(tensors, options, message):
    with pytest.raises(DTypeError, match=message):
        attention(*tensors, **options)


def test_other_devices_are_named():
    with pytest.raises(ShapeError, match="v is on meta but q is on cpu"):
        attention(Q, KV, KV.to("meta"), impl="reference")


def test_a_compiler_hears_of_wrong_sizes_too():
    with pytest.raises(Exception, match="k has head_size=8 but q has 16"):
        torch.compile(attention, backend="eager", fullgraph=True)(Q, KV[..., :8], KV)


def test_causal_is_true_or_false():
    with pytest.raises(DTypeError, match="causal is 'x', expected True or False"):
        attention(Q, KV, KV, causal="x")


LEARNED = torch.nn.Parameter(torch.tensor(0.3))
WINDOWS = torch.zeros(4, 2, 9, 16)


@pytest.mark.parametrize(
    "call",
    [
        lambda: attention(Q, KV, KV, softmax_scale=LEARNED),
        lambda: window_attention(WINDOWS, WINDOWS, WINDOWS, softmax_scale=LEARNED),
        lambda: attention_scores(WINDOWS, WINDOWS, softmax_scale=LEARNED),
    ],
)
def test_a_scale_that_wants_a_gradient_is_refused(call):
    with pytest.raises(UnsupportedError, match=r"softmax_scale requires a gradient.*q \* softmax"):
        call()
    with torch.no_grad():
        call()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: attention([1], KV, KV), "q"),
        (lambda: attention(Q, None, KV), "k"),
        (lambda: attention(Q, KV, KV, alibi_slopes=[1.0] * 4), "alibi_slopes"),
        (lambda: window_attention(WINDOWS, [1], WINDOWS), "k"),
        (lambda: window_attention(WINDOWS, WINDOWS, WINDOWS, bias=[1]), "bias"),
        (lambda: attention_scores(WINDOWS, None), "k"),
        (lambda: merge_states([1], [1]), "outs"),
        (lambda: merge_states(torch.zeros(2, 3, 4, 8), None), "lses"),
        (lambda: write_kv(RKV, RKV, KV, KV, [0] * 12), "slot_mapping"),
        (lambda: write_kv(None, RKV, KV, KV, torch.zeros(12).long()), "k"),
        (
            lambda: write_kv(
                RKV, RKV, KV.char(), KV.char(), torch.zeros(12).long(), k_scale=1.0, v_scale=1.0
            ),
            "k_scale",
        ),
    ],
)
def test_an_argument_that_is_no_tensor_is_named(call, name):
    with pytest.raises(DTypeError, match=f"^{name} is of type .*, expected a torch.Tensor"):
        call()


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scores_have_a_finite_scale(scale):
    with pytest.raises(ShapeError, match=f"softmax_scale is {scale}, expected a finite number"):
        attention_scores(Q.transpose(1, 2), Q.transpose(1, 2), softmax_scale=scale)


def test_explain_refuses_unknown_options():
    with pytest.raises(TypeError, match=r"explain_attention\(\) got an unexpected .* 'scale'"):
        explain_attention(Q, KV, KV, scale=1.0)
