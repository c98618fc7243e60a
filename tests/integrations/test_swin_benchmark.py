"""The correctness gate of the training-step benchmark accepts right results and no others."""

import torch
from benchmarks.swin_unetr import PAGETILE, SwinUnetrCase
from swin_models import framework

from pagetile.integrations.swin import attend


def spoil_attention(monkeypatch):
    """No window is masked any more."""
    call = attend.window_attention

    def without_shift(*args, regions=None, **options):
        return call(*args, **options)

    monkeypatch.setattr(attend, "window_attention", without_shift)


def spoil_norms(monkeypatch):
    """No residual is normalised any more."""
    from pagetile.integrations.swin.frameworks import monai_blocks

    call = monai_blocks.instance_norm

    def as_it_is(*args, residual_eps=None, **options):
        return call(*args, **options)

    monkeypatch.setattr(monai_blocks, "instance_norm", as_it_is)


def test_the_gate_of_the_benchmark_can_fail(monkeypatch):
    """The encoder has no norms of this kind, and the blocks no attention, so each fails alone."""
    framework("monai.networks.nets")
    case = SwinUnetrCase("tiny", (16, 16, 32), 12, device="cpu")
    # A whole step needs a larger volume: the test below.
    monkeypatch.setattr(SwinUnetrCase, "_check_implementations", lambda *_: [])
    checks = case.verify()
    assert [check.what.split(",")[0] for check in checks] == 2 * ["encoder"] + 2 * [
        "residual blocks"
    ]
    assert all(check.passed for check in checks)
    build = SwinUnetrCase._models

    def spoilt(case):  # only once the models are there: patching would see it
        models = build(case)
        spoil_attention(monkeypatch)
        spoil_norms(monkeypatch)
        return models

    monkeypatch.setattr(SwinUnetrCase, "_models", spoilt)
    assert not any(check.passed for check in case.verify())


def test_the_gate_names_what_the_timed_step_runs():
    framework("monai.networks.nets")
    case = SwinUnetrCase("tiny", (32, 32, 64), 12, dtype=torch.float32, device="cpu")
    checks = case._check_implementations(case._models()[PAGETILE], case._input())
    assert [check.what for check in checks] == [
        "attentions of the timed step run cpu (8)",
        "norms of the timed step run reference (20)",
    ]
    assert all(check.passed for check in checks)
