"""A patched Swin model computes what the unpatched one does, and so do its gradients."""

import re

import pytest
import torch
from swin_models import CASES, Case, gradients, monai, result, unetr

from pagetile.integrations import swin

ATTENTION = ("bias_table", "logit_scale", "qkv", "q_proj", "k_proj", "cpb_mlp", "position_bias_mlp")


def assert_same(found, expected, tolerance=1e-9):
    """Errors relative to the largest gradient of all: a key bias's own is only rounding."""
    assert found.keys() == expected.keys()
    largest = max(value.abs().max() for value in expected.values() if value is not None)
    for name, value in expected.items():
        assert (found[name] is None) == (value is None), name
        if value is not None:
            scale = largest if name != "out" else value.abs().max()
            worst = ((found[name] - value).abs().max() / scale).item()
            assert worst <= tolerance, f"{name} is off by {worst:.1e}"


def check_parity(case, attentions, dtype=torch.float64, tolerance=1e-9, **options):
    model, x = case.model(**options).to(dtype), case.input().to(dtype)
    expected = gradients(model, x)
    report = swin.patch(model)
    assert not report.left_alone, report
    attentions.clear()
    assert_same(gradients(model, x), expected, tolerance)
    assert len(attentions) == len(report.attentions) > 0
    return expected


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_models(name, attentions):
    expected = check_parity(CASES[name], attentions)
    learned = [key for key in expected if any(part in key for part in ATTENTION)]
    assert len(learned) >= 2 * len(attentions)
    assert any("regions" in call for call in attentions), "no case without a shift"
    assert not any(call.get("mask") is not None for call in attentions), "a dense mask got through"


def test_windows_of_seven_on_ever_smaller_maps(attentions):
    """Maps of 8×9×20, 4×5×10, 2×3×5 and 1×2×3: padded, partly and wholly clamped."""
    check_parity(Case(monai, (1, 1, 16, 18, 40), {"window_size": (7, 7, 7)}), attentions)
    assert [call["q"].shape[2] for call in attentions] == [343, 343, 140, 140, 30, 30, 6, 6]
    shifted = [call.get("regions") is not None for call in attentions]
    assert shifted == [False, True, False, True, False, False, False, False]


def test_unetr(attentions):
    check_parity(Case(unetr, (1, 1, 32, 32, 64)), attentions, torch.float32, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("feature_size", [12, 24])
@pytest.mark.parametrize(
    ("image", "dtype", "tolerance"),
    [((64, 64, 96), torch.float64, 1e-9), ((96, 96, 96), torch.float32, 1e-4)],
)
def test_unetr_of_working_size(image, dtype, tolerance, feature_size, attentions):
    case = Case(unetr, (1, 1, *image))
    check_parity(case, attentions, dtype, tolerance, feature_size=feature_size)


@pytest.mark.parametrize("name", ["monai-3d", "torchvision-v2", "timm-v2", "transformers-v2"])
def test_scales_past_the_clamp(name):
    """Swin v2 clamps its learned scale, whose gradient ends there; v1 has none to clamp."""
    case = CASES[name]
    model, x = case.model().double(), case.input().double()
    for key, parameter in model.named_parameters():
        if key.endswith("logit_scale"):
            parameter.data += torch.linspace(0, 4, len(parameter))[:, None, None]
    expected = gradients(model, x)
    swin.patch(model)
    assert_same(gradients(model, x), expected)


@pytest.mark.parametrize("name", ["monai-3d", "timm-v2", "transformers-v1"])
def test_training_with_every_other_dropout_draws_the_same(name):
    rates = {"monai-3d": {"drop_rate": 0.2, "drop_path_rate": 0.3}}.get(name)
    rates = rates or {"timm-v2": {"proj_drop_rate": 0.2}}.get(name)
    rates = rates or {"hidden_dropout_prob": 0.2}
    model, x = CASES[name].model(**rates).double().train(), CASES[name].input().double()
    torch.manual_seed(5)
    expected = gradients(model, x)
    swin.patch(model)
    torch.manual_seed(5)
    assert_same(gradients(model, x), expected)


# --- lower precision: as close to float64 as the original is ---------------------------------


def errors(case, run, device="cpu"):
    """Errors against float64 of the original and of the patched model, by name."""
    x = case.input()
    exact = gradients(case.model().double(), x.double())
    found = []
    for patched in (False, True):
        model = case.model().to(device)
        if patched:
            assert swin.patch(model).attentions
        found.append(run(model, x.to(device)))
    return [
        by_kind({name: value.double().cpu() - exact[name] for name, value in each.items()})
        for each in found
    ], by_kind(exact)


def by_kind(values):
    """Norms over all layers of each kind of parameter, which have more numbers than one layer's."""
    squares = {}
    for name, value in values.items():
        kind = re.sub(r"\.\d+", "", name)
        squares[kind] = squares.get(kind, 0.0) + value.norm() ** 2
    return {kind: square**0.5 for kind, square in squares.items()}


def assert_as_close(found, rounding):
    """Allow twice the original's error, plus rounding."""
    (original, patched), sizes = found
    largest = max(sizes.values())
    for key, error in patched.items():
        # A scale's gradient sums rows that are zero in sum, up to the rounding of the output.
        band = rounding * max(sizes[key], 1e-2 * largest)
        assert error <= 2 * original[key] + band, key


@pytest.mark.parametrize("name", CASES)
def test_float32_is_as_close_to_float64_as_the_original(name):
    assert_as_close(errors(CASES[name], gradients), 64 * 2**-24)


@pytest.mark.parametrize("name", CASES)
def test_autocast_is_as_close_to_float64_as_the_original(name):
    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return {"out": result(model(x)).detach()}

    assert_as_close(errors(CASES[name], run), 2**-8)


@pytest.mark.parametrize("name", CASES)
def test_gradients_under_autocast_reach_every_parameter_in_its_type(name):
    case = CASES[name]
    model, x = case.model(), case.input()
    swin.patch(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = result(model(x))
    out.float().square().mean().backward()
    for key, parameter in model.named_parameters():
        if any(part in key for part in ATTENTION):
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.isfinite().all(), key


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["monai-3d", "torchvision-v2", "timm-v1", "transformers-v2"])
def test_a_gpu_is_as_close_to_float64_as_the_original(name, dtype):
    def run(model, x):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            return gradients(model, x)

    rounding = 64 * 2**-24 if dtype == torch.float32 else 2**-7
    assert_as_close(errors(CASES[name], run, "cuda"), rounding)


# --- checkpointing, compilation ---------------------------------------------------------------


def test_gradient_checkpointing_of_monai(attentions):
    case = CASES["monai-3d"]
    expected = gradients(case.model().double(), case.input().double())
    model = case.model(use_checkpoint=True).double()
    swin.patch(model)
    attentions.clear()
    assert_same(gradients(model, case.input().double()), expected)
    assert len(attentions) == 2 * 8  # once forward, once more backward


@pytest.mark.parametrize("name", ["timm-v1", "timm-v2", "transformers-v1", "transformers-v2"])
def test_gradient_checkpointing_elsewhere(name, attentions):
    case = CASES[name]
    model, x = case.model().double().train(), case.input().double()
    expected = gradients(model, x)
    swin.patch(model)
    if name.startswith("timm"):
        model.set_grad_checkpointing()
    elif hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:  # its name before Transformers 5.21
        model.gradient_checkpointing_enable()
    attentions.clear()
    assert_same(gradients(model, x), expected)
    assert len(attentions) >= 2 * len(swin.patch(model).attentions)


@pytest.mark.parametrize("name", ["monai-2d", "timm-v2", "transformers-v1"])
def test_compiled(name):
    """The tracer sees one operator; the framework decides the rest of the graph."""
    case = CASES[name]
    few = {"depths": (2, 1, 1, 1)} if name == "monai-2d" else {}  # each block is traced for seconds
    model, x = case.model(**few).double(), case.input().double()
    expected = gradients(model, x)
    swin.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(
        gradients(compiled, x) | {},
        {f"_orig_mod.{k}" if k not in ("out", "x") else k: v for k, v in expected.items()},
    )
    torch._dynamo.reset()


def test_metadata_of_monai_stays(attentions):
    """MONAI's images are tensors with metadata."""
    from monai.data import MetaTensor

    model, x = monai().eval(), torch.randn(1, 1, 12, 12, 12)
    expected = model(MetaTensor(x, meta={"name": "scan"}))
    swin.patch(model)
    attentions.clear()
    found = model(MetaTensor(x, meta={"name": "scan"}))
    assert attentions
    for found_one, expected_one in zip(found, expected, strict=True):
        assert type(found_one) is type(expected_one)
        assert found_one.meta["name"] == "scan"
        torch.testing.assert_close(found_one, expected_one, rtol=1e-4, atol=1e-5)
