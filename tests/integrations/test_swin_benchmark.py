"""The gate before the benchmark of a training step lets right results through, and no others."""

import pytest
from benchmarks.swin_unetr import SwinUnetrCase
from swin_models import framework

from pagewise.integrations.swin import attend


def spoil_attention(monkeypatch):
    """No window is masked any more."""
    call = attend.window_attention

    def without_shift(*args, regions=None, **options):
        return call(*args, **options)

    monkeypatch.setattr(attend, "window_attention", without_shift)


def spoil_norms(monkeypatch):
    """No residual is normalised any more."""
    from pagewise.integrations.swin.frameworks import monai_blocks

    call = monai_blocks.instance_norm

    def as_it_is(*args, residual_eps=None, **options):
        return call(*args, **options)

    monkeypatch.setattr(monai_blocks, "instance_norm", as_it_is)


@pytest.mark.parametrize(
    ("spoil", "seen"), [(spoil_attention, "encoder"), (spoil_norms, "residual blocks")]
)
def test_the_gate_of_the_benchmark_can_fail(spoil, seen, monkeypatch):
    framework("monai.networks.nets")
    case = SwinUnetrCase("tiny", (32, 32, 64), 12, device="cpu")
    assert all(check.passed for check in case.verify())
    build = SwinUnetrCase._models

    def spoilt(case):  # only once the models are there: patching would see it
        models = build(case)
        spoil(monkeypatch)
        return models

    monkeypatch.setattr(SwinUnetrCase, "_models", spoilt)
    checks = case.verify()
    assert len(checks) == 4
    assert not any(check.passed for check in checks if check.what.startswith(seen))
    assert all(check.passed for check in checks if not check.what.startswith(seen))
