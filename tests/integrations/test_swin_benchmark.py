"""The gate before the benchmark of a training step lets right results through, and no others."""

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


def test_the_gate_of_the_benchmark_can_fail(monkeypatch):
    framework("monai.networks.nets")
    case = SwinUnetrCase("tiny", (32, 32, 64), 12, device="cpu")
    checks = case.verify()
    assert len(checks) == 4
    assert all(check.passed for check in checks)
    build = SwinUnetrCase._models
    for spoil, seen in (spoil_attention, "encoder"), (spoil_norms, "residual blocks"):
        with monkeypatch.context() as patch:

            def spoilt(case, patch=patch, spoil=spoil):  # afterwards: patching would see it
                models = build(case)
                spoil(patch)
                return models

            patch.setattr(SwinUnetrCase, "_models", spoilt)
            checks = case.verify()
        assert {check.what.split(",")[0] for check in checks if not check.passed} == {seen}
