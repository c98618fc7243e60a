"""attention_scores against float64, with poison around its inputs and in its output."""

import math
import os

import pytest
import torch
from staging_memory import StagingMemory
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from pagetile import DTypeError, ShapeError, UnsupportedError, attention_scores, shapes
from pagetile.ops.attention_scores import api
from pagetile.testing import poisoned_memory

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ON_GPU = torch.cuda.is_available()

SHAPES = [  # batch, heads, q_len, k_len, head_size
    (2, 3, 23, 43, 16),
    (1, 2, 70, 200, 8),
    (1, 1, 130, 43, 16),
    (1, 1, 130, 3, 4),
    (1, 1, 70, 150, 10),
    (1, 1, 3, 777, 8),  # too long for rows of one line
    (1, 1, 3, 776, 8),  # and of whole vectors
    (1, 1, 2, 728, 256),  # and of float32 with tiles of 16 rows
    (2, 2, 5, 8, 24),
    (3, 1, 9, 3, 4),
    (1, 3, 20, 17, 30),
    (1, 1, 1, 1, 64),
    (2, 1, 33, 150, 10),
    (0, 2, 3, 4, 8),
    (1, 2, 0, 7, 8),
    (1, 2, 7, 0, 8),
]
IMPLEMENTATIONS = ["reference", "cpu", pytest.param("triton", marks=pytest.mark.interpret)]


@pytest.fixture(autouse=True)
def memory_for_the_interpreter(monkeypatch):
    if os.environ.get("TRITON_INTERPRET") == "1":
        from pagetile.ops.attention_scores import triton

        monkeypatch.setattr(triton, "_refuse_interpreter", lambda device: None)
        memory = StagingMemory()
        for name in vars(StagingMemory):
            if not name.startswith("_"):
                monkeypatch.setattr(triton, name, getattr(memory, name))
        return memory
    return None


@pytest.fixture
def as_on_hopper(monkeypatch):
    """Interpret the configuration that would run on Hopper."""
    triton = pytest.importorskip("pagetile.ops.attention_scores.triton")
    make = triton.make_launcher
    if not ON_GPU:
        monkeypatch.setattr(
            triton, "make_launcher", lambda *form: make(*form[:4], (9, 0), *form[5:])
        )
    return triton


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request):
    return request.param


def strided(*shape, dtype, device="cpu"):
    """Rows and heads in another order, and NaN between the rows."""
    batch, heads, rows, size = shape
    random = torch.Generator().manual_seed(rows)
    buffer = torch.full((batch, rows, heads + 1, size + 8), math.nan, dtype=dtype)
    view = buffer[:, :, 1:, :size]
    view.copy_(torch.randn(view.shape, generator=random))
    return buffer.to(device)[:, :, 1:, :size].transpose(1, 2)


def check(shape, dtype, impl, scale=0.3, is_flat=False):
    batch, heads, q_len, k_len, size = shape
    device = "cuda" if impl == "triton" and ON_GPU else "cpu"
    q = strided(batch, heads, q_len, size, dtype=dtype, device=device)
    k = strided(batch, heads, k_len, size, dtype=dtype, device=device)
    if is_flat:
        q, k = q.contiguous(), k.contiguous()
    with poisoned_memory():
        scores = attention_scores(q, k, softmax_scale=scale, impl=impl)
    assert scores.dtype == dtype
    assert scores.is_contiguous()
    exact = q.double() @ k.double().mT * scale
    assert scores.shape == exact.shape
    # One rounding to the element type, and float32's of a sum of ``head_size`` terms.
    terms = q.double().abs() @ k.double().abs().mT * abs(scale)
    u, u32 = torch.finfo(dtype).eps / 2, torch.finfo(F32).eps / 2
    allowed = 1.01 * u * exact.abs() + (size + 2) * u32 * terms + torch.finfo(dtype).tiny
    assert ((scores.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_score_is_rounded_once(shape, dtype, impl):
    k_len, size = shape[3:]
    if impl == "cpu" and (k_len < 16 or size % 8):
        with pytest.raises(UnsupportedError, match=r"cpu cannot run this: (k_len|head_size) is"):
            check(shape, dtype, impl)
    else:
        check(shape, dtype, impl)


@pytest.mark.parametrize("scale", [1.0, 1, -2.0, 0.0], ids=repr)
@pytest.mark.parametrize("is_flat", [True, False], ids=["one stride", "two strides"])
def test_heads_one_after_another_and_products_as_they_are(is_flat, scale, impl):
    check(SHAPES[0], F16, impl, scale, is_flat)


@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="a compiled kernel has its own")
def test_more_of_a_batch_than_an_axis_of_a_grid(monkeypatch):
    triton = pytest.importorskip("pagetile.ops.attention_scores.triton")
    monkeypatch.setattr(triton, "_MOST", 2)  # which is 128 bytes of these, as that of all is
    check((5, 2, 4, 8, 8), F16, "triton")
    with pytest.raises(UnsupportedError, match="num_heads is 3; up to 2 run"):
        check((1, 3, 4, 8, 8), F16, "triton")


@pytest.mark.gpu
def test_more_of_a_batch_than_an_axis_of_a_grid_on_a_gpu():
    check((66_666, 2, 5, 9, 8), F16, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("q_len", "k_len"), [(343, 343), (49, 200), (200, 49)])
def test_keys_of_later_programs_are_prefetched_on_a_gpu(q_len, k_len):
    for is_flat in (True, False):
        q, k = (
            torch.randn(2000, n, 3, 16, dtype=F16, device="cuda").transpose(1, 2)
            for n in (q_len, k_len)
        )
        if is_flat:
            q, k = q.contiguous(), k.contiguous()
        exact = (q[-3:].double() @ k[-3:].double().mT).half()
        scores = attention_scores(q, k, impl="triton")[-3:]
        torch.testing.assert_close(scores, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_bfloat16(impl):
    check(SHAPES[0], BF16, impl)


@pytest.mark.parametrize("shape", [(1, 1, 200, 520, 24), (3, 2, 70, 513, 16)], ids=str)
def test_tiles_of_keys_and_pieces_of_heads_on_a_cpu(shape):
    check(shape, F32, "cpu")


@pytest.mark.interpret
@pytest.mark.parametrize(
    "shape", [SHAPES[0], (2, 1, 1, 3, 4), (1, 1, 2, 777, 8), (1, 1, 2, 776, 8)], ids=str
)
def test_lines_that_tma_stores(shape, as_on_hopper):
    check(shape, F16, "triton")


@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="what a GPU prefetches cannot be seen")
@pytest.mark.parametrize("is_flat", [True, False], ids=["one head after another", "side by side"])
@pytest.mark.parametrize(("q_len", "k_len"), [(70, 70), (5, 70), (70, 5)])
def test_keys_of_the_next_batch_are_prefetched(
    q_len, k_len, is_flat, as_on_hopper, memory_for_the_interpreter, monkeypatch
):
    monkeypatch.setattr(as_on_hopper, "_ROWS_AT_ONCE", 0)
    q, k = (torch.randn(3, n, 2, 8, dtype=F16).transpose(1, 2) for n in (q_len, k_len))
    if is_flat:
        q, k = q.contiguous(), k.contiguous()
    scores = attention_scores(q, k, impl="triton")
    torch.testing.assert_close(scores, q @ k.mT, rtol=1e-3, atol=1e-3)

    spans = memory_for_the_interpreter.prefetched
    rows = -(-q_len // 64) * 64  # of programs: each asks for as many keys as it has rows
    heads = range(2) if is_flat else range(1)
    wanted = {
        x[batch, head, row].data_ptr()
        for x in (q, k) for batch in (1, 2) for head in heads for row in range(len(x[0, 0][:rows]))
    }  # fmt: skip
    asked = {at for begin, end in spans for at in range(begin, end, 16)}
    assert wanted <= asked
    memory = {
        at
        for x in (q, k)
        for at in range(x[1].data_ptr(), x.data_ptr() + x.numel() * x.itemsize, 16)
    }
    assert asked <= memory
    assert sum(end - begin for begin, end in spans) == 16 * len(asked)  # each once


@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="what a GPU prefetches cannot be seen")
def test_nothing_is_prefetched_that_no_program_reads(
    as_on_hopper, memory_for_the_interpreter, monkeypatch
):
    monkeypatch.setattr(as_on_hopper, "_ROWS_AT_ONCE", 0)
    apart = strided(3, 2, 5, 8, dtype=F16)
    unaligned = torch.randn(3 * 2 * 5 * 8 + 1, dtype=F16)[1:].view(3, 2, 5, 8)
    for q in (apart, unaligned):
        scores = attention_scores(q, q, impl="triton")
        torch.testing.assert_close(scores, q @ q.mT, rtol=1e-3, atol=1e-3)
    assert memory_for_the_interpreter.prefetched == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (5, 3, 343, 343, 16),
        (3, 4, 49, 49, 32),
        (2, 1, 600, 1001, 128),
        (1, 2, 100, 3001, 256),
        (2, 3, 64, 512, 64),
        (64, 2, 392, 392, 16),
        (2, 2, 70, 3000, 16),
        (700, 3, 30, 144, 32),
    ],
    ids=str,
)
def test_windows_on_a_gpu(shape, dtype):
    check(shape, dtype, "triton")


@pytest.mark.gpu
def test_more_scores_than_32_bits_count_on_a_gpu():
    q = torch.randn(1, 2, 40_000, 8, dtype=F16, device="cuda")
    k = torch.randn(1, 2, 40_001, 8, dtype=F16, device="cuda")
    scores = attention_scores(q, k, impl="triton")
    assert scores.numel() > 2**31
    torch.testing.assert_close(scores[:, :, -3:], q[:, :, -3:] @ k.mT, rtol=1e-3, atol=1e-3)


def test_two_calls_give_the_same_bits(impl):
    device = "cuda" if impl == "triton" and ON_GPU else "cpu"
    q = strided(2, 3, 40, 16, dtype=F16, device=device)
    assert torch.equal(*(attention_scores(q, q, impl=impl) for _ in range(2)))


def test_the_default_scale_is_one():
    q = torch.randn(1, 1, 3, 8)
    torch.testing.assert_close(attention_scores(q, q), q @ q.mT)
    torch.testing.assert_close(attention_scores(q, q, softmax_scale=None), q @ q.mT * 8**-0.5)


def test_gradients_are_the_references():
    q, k = (torch.randn(1, 2, 3, 8, dtype=F64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda q, k: attention_scores(q, k, softmax_scale=0.5), (q, k))


@pytest.mark.interpret
def test_triton_leaves_gradients_to_the_reference():
    device = "cuda" if ON_GPU else "cpu"
    q = torch.randn(1, 2, 3, 8, device=device, requires_grad=True)
    with pytest.raises(UnsupportedError, match="triton cannot run this: a gradient is wanted"):
        attention_scores(q, q, impl="triton")
    attention_scores(q, q).sum().backward()


@pytest.fixture
def repeated(monkeypatch):
    """Tensors of a call that was made twice, after which validation is skipped."""
    q, k = torch.randn(2, 1, 2, 20, 16).unbind()
    for _ in range(2):
        attention_scores(q, k)
    monkeypatch.setattr(api, "_find_and_run", refuse)
    return q, k


class Refused(Exception):
    """The call was validated and dispatched again."""


def refuse(*arguments):
    raise Refused


@pytest.mark.skipif(shapes._Guards is None, reason="this torch has no guards")
def test_a_repeated_call_is_recognised(repeated):
    q, k = repeated
    attention_scores(q, k)
    torch.testing.assert_close(attention_scores(k, q), k @ q.mT)
    with torch.inference_mode(), torch.no_grad(), pytest.raises(Refused):
        attention_scores(q, k)  # the guard is careful here


class Seen(TorchDispatchMode):
    """A mode that sees all operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


OBSERVERS = {
    "another scale": lambda q, k: attention_scores(q, k, softmax_scale=0.5),
    "a named implementation": lambda q, k: attention_scores(q, k, impl="cpu"),
    "other strides": lambda q, k: attention_scores(q.mT.contiguous().mT[..., ::1], k),
    "another type": lambda q, k: attention_scores(q.half(), k.half()),
    "fewer keys": lambda q, k: attention_scores(q, k[:, :, 1:]),
    "no tensor": lambda q, k: attention_scores(q, None),
    "one tensor": lambda q, k: attention_scores(q, q),
    "a gradient": lambda q, k: attention_scores(q, k.clone().requires_grad_()),
    "a tangent": lambda q, k: torch.func.jvp(lambda q: attention_scores(q, k), (q,), (q,)),
    "a batch": lambda q, k: torch.func.vmap(attention_scores)(q[None], k[None]),
    "a trace": lambda q, k: torch.jit.trace(lambda q: attention_scores(q, k), (q,)),
    "make_fx": lambda q, k: make_fx(lambda q: attention_scores(q, k))(q),
    "a dispatch mode": lambda q, k: within(Seen(), attention_scores, q, k),
    "fake tensors": lambda q, k: within(FakeTensorMode(), call_with_ones, q.shape),
    "autocast": lambda q, k: within(torch.autocast("cpu", torch.bfloat16), attention_scores, q, k),
    "a subclass": lambda q, k: attention_scores(q.as_subclass(Subclass), k),
}


class Subclass(torch.Tensor):
    """A tensor that may intercept operations."""


def within(context, function, *arguments):
    with context:
        return function(*arguments)


def call_with_ones(shape):
    return attention_scores(torch.ones(shape), torch.ones(shape))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own calls, too
@pytest.mark.parametrize("change", OBSERVERS)
def test_a_call_that_differs_is_validated_and_dispatched_anew(change, repeated):
    with pytest.raises(Refused):
        OBSERVERS[change](*repeated)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_tangent_of_a_repeated_call():
    q, k, t = torch.randn(3, 1, 2, 20, 16).unbind()
    for _ in range(3):
        attention_scores(q, k)
    with forward_ad.dual_level():
        found = attention_scores(forward_ad.make_dual(q, t), k)
        torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, t @ k.mT)
    torch.testing.assert_close(attention_scores(q, k), q @ k.mT)


def test_wrong_arguments_are_named():
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ShapeError, match="k has head_size=16 but q has 8"):
        attention_scores(q, torch.zeros(1, 2, 3, 16))
    with pytest.raises(ShapeError, match="k has num_heads=1 but q has 2"):
        attention_scores(q, torch.zeros(1, 1, 3, 8))
    with pytest.raises(ShapeError, match=r"q has 3 dimensions.*expected 4"):
        attention_scores(q[0], q)
    with pytest.raises(ShapeError, match=r"k has stride 3 in its last dimension.*contiguous\(\)"):
        attention_scores(q, torch.zeros(1, 2, 8, 3).mT)
    with pytest.raises(DTypeError, match="k is float16, expected float32"):
        attention_scores(q, q.half())
    with pytest.raises(DTypeError, match="q is int64"):
        attention_scores(q.long(), q.long())
    with pytest.raises(UnsupportedError, match="expected 'auto' or one of triton, cpu, reference"):
        attention_scores(q, q, impl="fast")


def test_it_is_computed_as_autocast_computes_products():
    q, k = torch.randn(2, 1, 2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_scores(q, k).dtype == torch.bfloat16
        assert attention_scores(q.double(), k.double()).dtype == torch.float64


def test_observers_see_torchs_operations():
    q, k = torch.randn(2, 3, 1, 2, 5, 16)
    found = torch.func.vmap(attention_scores)(q, k)
    torch.testing.assert_close(found, torch.stack([attention_scores(*x) for x in zip(q, k)]))  # noqa: B905
    with FakeTensorMode():
        assert attention_scores(*torch.randn(2, 1, 2, 5, 16)).shape == (1, 2, 5, 5)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_a_compiled_call_refuses_a_scale_that_is_not_finite(scale):
    """It returned infinities and NaN."""
    q = torch.randn(1, 2, 16, 16)
    compiled = torch.compile(lambda q, s: attention_scores(q, q, softmax_scale=s), backend="eager")
    torch.testing.assert_close(compiled(q, 0.5), q @ q.mT * 0.5)
    torch.testing.assert_close(compiled(q, 0.25), q @ q.mT * 0.25)
    with pytest.raises(ShapeError, match=r"softmax_scale is .* expected a finite number"):
        compiled(q, scale)
