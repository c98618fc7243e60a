import pytest
import torch
from torch.nn import functional

from pagetile.errors import ShapeError, UnsupportedError
from pagetile.fused.gated_activation import ACTIVATIONS, gated_activation, reference

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
OWN = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request):
    return request.param


def check(shape, activation, dtype, impl, mirror):
    gate_up = (4 * torch.randn(*shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    gate_up[..., :3] = torch.tensor([-1e4, 1e4, 0.0])  # far out, and the middle
    with mirror(gate_up, impl=impl) as (there,):
        out = gated_activation(there, activation, impl=impl).cpu()
    gate, up = gate_up.double().chunk(2, -1)
    true = OWN[activation](gate) * up
    assert (out.dtype, out.shape) == (dtype, true.shape)
    assert out.is_contiguous()
    # The tail of GELU is a difference from 1, of which torch's AVX2 code has few digits.
    is_torchs = activation == "gelu" and impl == "reference"
    tail = (gate.clamp(-8, 8) * up).abs() if is_torchs else 0.0
    bound = torch.finfo(dtype).eps * (4 * true.abs() + tail) + 1e-6
    assert ((out.double() - true).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 2, 48), (5, 14)], ids=str)
def test_the_formula(impl, shape, activation, dtype, mirror):
    check(shape, activation, dtype, impl, mirror)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_cpu_kernel_does_not_call_the_reference(activation, monkeypatch):
    monkeypatch.setattr(reference, "run", None)
    gate_up = torch.tensor([[torch.nan, torch.inf, -30.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    out = gated_activation(gate_up, activation, impl="cpu")[0]
    assert out[0].isnan()
    assert out[1] == torch.inf
    assert out[2:].abs().max() < 1e-9


def test_a_row_of_several_tiles(impl, mirror):
    check((2, 2 * 2500), "silu", F32, impl, mirror)


@pytest.mark.gpu
def test_many_wide_rows(mirror):
    check((4096, 2 * 14336), "silu", BF16, "triton", mirror)


def test_no_rows(impl):
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    assert gated_activation(torch.zeros(0, 8, device=device), "silu", impl=impl).shape == (0, 4)


def test_wrong_arguments_are_named():
    with pytest.raises(ShapeError, match=r"gate_up is \[2, 7\]"):
        gated_activation(torch.zeros(2, 7), "silu")
    with pytest.raises(UnsupportedError, match="activation is 'tanh'"):
        gated_activation(torch.zeros(2, 8), "tanh")
    with pytest.raises(UnsupportedError, match="gaps between its rows"):
        gated_activation(torch.zeros(2, 16)[:, :8], "silu", impl="triton")
