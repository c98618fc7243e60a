"""The gate before the benchmark of a training step lets right results through, and no others."""

from benchmarks.swin_unetr import SwinUnetrCase
from swin_models import framework

from pagewise.integrations.swin import attend


def test_the_gate_of_the_benchmark_can_fail(monkeypatch):
    framework("monai.networks.nets")
    case = SwinUnetrCase("tiny", (32, 32, 64), 12, device="cpu")
    assert all(check.passed for check in case.verify())
    build, call = SwinUnetrCase._models, attend.window_attention

    def without_shift(*args, regions=None, **options):
        return call(*args, **options)

    def spoilt(case):  # only once the models are there: patching would see it
        models = build(case)
        monkeypatch.setattr(attend, "window_attention", without_shift)
        return models

    monkeypatch.setattr(SwinUnetrCase, "_models", spoilt)
    assert not any(check.passed for check in case.verify())
