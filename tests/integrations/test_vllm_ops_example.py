"""The documents' two algorithms, as the example has them for learners, against float64."""

import importlib.util
from pathlib import Path

import pytest
import torch
from vllm_cases import F16, F32, decode_case, dense_scores, make_call

EXAMPLE = Path(__file__).parents[2] / "examples" / "documents_kernels.py"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("triton", reason="Triton is not installed: no kernels to run")
    spec = importlib.util.spec_from_file_location("documents_kernels", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.interpret
@pytest.mark.parametrize("partition", [None, 64])
@pytest.mark.parametrize(("dtype", "block_size"), [(F32, 16), (F16, 32)], ids=str)
def test_both_versions_are_right(example, dtype, block_size, partition, mirror):
    call = make_call(decode_case((1, 130, 64), dtype=dtype, block_size=block_size))
    call.tables.clamp_(max=len(call.key_cache) - 1)
    tensors = (call.query, call.key_cache, call.value_cache, call.tables, call.seq_lens, call.out)
    with mirror(*tensors, impl="triton") as (*there, out):
        out.copy_(example.attend(*there, 0.125, partition))
    near = 3e-3 if dtype == F16 else 1e-5
    for seq, length in enumerate(call.seq_lens.tolist()):
        if length:
            s, v = dense_scores(call, seq)
            expected = (s.softmax(-1)[:, None] @ v)[:, 0]
            torch.testing.assert_close(call.out[seq].double(), expected, rtol=near, atol=near)
        else:
            assert not call.out[seq].any()


@pytest.mark.interpret
def test_the_example_runs(example, capsys):
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert [float(line.split()[-1]) < 1e-5 for line in lines] == [True, True]


def test_without_a_gpu_it_says_how_to_run(example, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="TRITON_INTERPRET=1"):
        example.main()


def test_each_version_fits_on_a_screen():
    text = EXAMPLE.read_text()
    kernels = {part.split("(")[0]: part for part in text.split("@triton.jit\ndef ")[1:]}
    kernels = {
        name: [line for line in part.split("\ndef ")[0].splitlines() if line.strip()]
        for name, part in kernels.items()
    }
    shared = len(kernels["attend_block"]) + len(kernels["load_query"])
    assert len(kernels["single_pass_kernel"]) + shared <= 60
    assert len(kernels["partition_kernel"]) + len(kernels["reduce_kernel"]) <= 60
