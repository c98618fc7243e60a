"""The gate of the window benchmarks verifies the timed calls, and peers get the best inputs."""

import pytest
import torch
from benchmarks.window_workloads import WindowWorkloadsCase
from benchmarks.windows import WindowCase, WindowInputs, compare

from pagetile.ops.window_attention import cpu
from pagetile.tiles.state import AttentionOutput

F16, F32 = torch.float16, torch.float32
SMALL = WindowCase("small", (16, 16), (4, 4), 2, 8, images=2, dtype=F32, device="cpu")


@pytest.mark.parametrize("cosine", [False, True])
def test_the_gate_names_the_implementation_and_checks_all_gradients(cosine):
    case = WindowCase("c", (8, 12), (4, 4), 2, 8, 2, F32, device="cpu", cosine=cosine)
    checks = case.verify()
    names = ["out", "gradient of q", "of k", "of v", "of the table", "of the scale"]
    wanted = [f"cpu: {name}" for name in names[: 5 + cosine]]
    assert [check.what for check in checks[:-1]] == wanted
    assert checks[-1].what == "the timed call runs cpu, with the same bits again"
    assert all(check.passed for check in checks), checks


@pytest.mark.parametrize("window", [0, 13, 17, 31])
def test_one_wrong_window_of_many_fails_the_gate(window, monkeypatch):
    """An earlier gate compared eight windows only, at another size than the timed one."""
    right = cpu.forward

    def forward(problem, x):
        out, lse = right(problem, x)
        out = out.clone()
        out[window, 1, 2] += 1e-3
        return AttentionOutput(out, lse)

    monkeypatch.setattr(cpu, "forward", forward)
    assert not all(check.passed for check in SMALL.verify())


def test_a_wrong_gradient_of_the_table_fails_the_gate(monkeypatch):
    from dataclasses import replace

    right = cpu.backward

    def backward(*arguments):
        gradients = right(*arguments)
        return replace(gradients, bias_table=gradients.bias_table * 1.001)

    monkeypatch.setattr(cpu, "backward", backward)
    failed = [check.what for check in SMALL.verify() if not check.passed]
    assert failed == ["cpu: of the table"]


def test_a_workload_that_times_another_implementation_fails_the_gate(monkeypatch):
    monkeypatch.setattr(WindowInputs, "implementation", lambda self: "reference")
    checks = WindowWorkloadsCase("w", "a model", (SMALL,), device="cpu").verify()
    assert [check.detail for check in checks] == ["reference is not what is timed"] * 2


def test_wrong_eager_code_excuses_no_error():
    exact = torch.randn(64, dtype=torch.float64)
    wrong = exact + 0.1 * exact.abs().max()
    assert not compare("x", wrong.half(), exact, wrong.half(), F16).passed


@pytest.mark.parametrize("is_shifted", [False, True])
def test_no_backend_has_to_copy_the_dense_mask(is_shifted):
    case = WindowCase("m", (14, 14), (7, 7), 2, 8, 2, F16, device="cpu", is_shifted=is_shifted)
    inputs = WindowInputs(case)
    dense = inputs.dense_mask()
    assert all(stride % 8 == 0 for stride in dense.stride()[:-1])
    assert torch.equal(dense, inputs.bias().half() + inputs.mask())


def test_heads_of_30_are_padded_for_peers():
    case = WindowCase("hat", (8, 8), (4, 4), 2, 30, dtype=F32, device="cpu")
    inputs = WindowInputs(case)
    q, k, v, dout = inputs.padded_rows()
    assert q.shape[-1] == dout.shape[-1] == 32
    scale = inputs.softmax_scale
    assert scale == 30**-0.5
    found = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=inputs.dense_mask(), scale=scale
    )
    torch.testing.assert_close(found[..., :30], inputs.results("eager")["out"])


def test_a_peer_that_computes_something_else_is_named(monkeypatch):
    right = WindowInputs.bias
    monkeypatch.setattr(WindowInputs, "bias", lambda self: right(self) + torch.eye(16))
    measurement = SMALL.measure(repeats=1)
    assert set(measurement.times) == {"pagetile", "pagetile, both"}
    assert set(measurement.absent) == {"eager", "sdpa"}
    assert all(reason.startswith("wrong: ") for reason in measurement.absent.values())


def test_a_measurement_has_gradients_of_every_peer():
    names = set(SMALL.measure(repeats=1).times)
    assert names == {
        f"{way}{both}" for way in ("pagetile", "eager", "sdpa") for both in ("", ", both")
    }
