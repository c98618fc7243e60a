"""The modules patched around MONAI's attention: blocks, patch mergings, and the U-Net's norms."""

import pytest
import torch
from swin_models import Case, framework, gradients, monai, unetr
from test_swin_parity import assert_as_close, assert_same, check_parity, errors

from pagetile.integrations import swin
from pagetile.integrations.swin.swapped import Swapped

SMALL = Case(unetr, (1, 1, 64, 32, 32))


@pytest.fixture
def norms(monkeypatch):
    """Every call of ``instance_norm`` that a drop-in makes."""
    framework("monai.networks.blocks.dynunet_block")
    from pagetile.integrations.swin.frameworks import monai_blocks

    calls = []
    call = monai_blocks.instance_norm

    def instance_norm(x, residual=None, **options):
        calls.append({"x": x, "residual": residual, **options})
        return call(x, residual, **options)

    monkeypatch.setattr(monai_blocks, "instance_norm", instance_norm)
    return calls


def test_the_report_names_what_is_around_attention():
    report = swin.patch(SMALL.model())
    counts = {kind: len(getattr(report, kind)) for kind in ("blocks", "mergings", "norms")}
    assert counts == {"blocks": 8, "mergings": 4, "norms": 10}
    lines = str(report).splitlines()
    assert "whole maps instead of windows: 8 blocks" in lines
    assert "one gather instead of a slice for each token: 4 patch mergings" in lines
    assert "instance norm, residual and activation in one kernel: 10 residual blocks" in lines
    assert "  swinViT.layers1.0.downsample: MONAI, 3 axes, 12 channels" in lines
    last = "  decoder1.conv_block: MONAI, 3 axes, with a convolution of the residual, 12 channels"
    assert lines[-1] == last


# --- blocks --------------------------------------------------------------------------------------


def block_of(model, index):
    return model.layers1[0].blocks[index]


@pytest.mark.parametrize("index", [0, 1])
def test_a_block_in_a_foreign_layer_takes_its_arguments(index, attentions):
    """Dense masks are passed on, and without a mask none is applied, whatever the shift."""
    model = monai().double().eval()
    block = block_of(model, index)
    x = torch.randn(1, 6, 6, 6, 12, dtype=torch.float64)
    mask = torch.randn(8, 27, 27, dtype=torch.float64)
    expected = [block(x, None), block(x, mask)]
    swin.patch(model)
    assert isinstance(block, Swapped)
    attentions.clear()
    torch.testing.assert_close([block(x, None), block(x, mask)], expected)
    assert [call.get("mask") is not None for call in attentions] == [False, index == 1]


@pytest.mark.parametrize("part", ["attn", "attn.qkv", "attn.proj_drop"])
def test_hooks_of_an_attention_see_windows(part):
    model, x = monai().eval(), torch.randn(1, 1, 12, 12, 12)
    seen = []
    block_of(model, 1).get_submodule(part).register_forward_hook(
        lambda module, inputs, out: seen.append(out.shape)
    )
    model(x)
    swin.patch(model)
    model(x)
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_dropouts_draw_whatever_the_rest_does():
    """As in Monte-Carlo dropout, where a model in evaluation runs with its dropouts enabled."""
    model, x = monai(drop_rate=0.3).eval(), torch.randn(1, 1, 12, 12, 12)
    swin.patch(model)
    assert all(map(torch.equal, model(x), model(x)))
    for block in (block_of(model, 0), block_of(model, 1)):
        block.attn.proj_drop.train()
    assert not torch.equal(model(x)[1], model(x)[1])
    for block in (block_of(model, 0), block_of(model, 1)):
        block.attn.proj_drop = torch.nn.Identity()
    model.train()(x)


def test_a_layer_that_is_no_plain_linear_sees_windows(attentions):
    model, x = monai().eval(), torch.randn(1, 1, 10, 14, 8)
    expected = model(x)
    swin.patch(model)
    attention = block_of(model, 1).attn
    attention.qkv = torch.nn.Sequential(attention.qkv)
    attentions.clear()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert len(attentions) == 8


def test_under_a_compiler_windows_are_cut_as_before(monkeypatch):
    """An index would have to be compiled for each size."""
    model, x = monai().eval(), torch.randn(1, 1, 12, 12, 12)
    swin.patch(model)
    expected = model(x)
    shapes = []
    attention = type(block_of(model, 0).attn)
    monkeypatch.setattr(attention, "_attend_map", lambda self, x, cut: shapes.append(x.shape))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = model(x)
    assert not shapes
    for found_one, before in zip(found, expected, strict=True):
        torch.testing.assert_close(found_one, before, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_layer_is_compiled_for_maps_of_any_size():
    layer = monai(spatial_dims=2, window_size=(4, 4), depths=(1, 1, 1, 1)).layers1[0].eval()
    x = torch.randn(1, 12, 9, 7)
    expected = layer(x)
    swin.patch(layer)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("bias", [True, False])
def test_padded_tokens_have_the_bias_of_the_layer(bias, attentions):
    """Maps of 5, 7 and 4 tokens in windows of 3 are mostly padding at their ends."""
    check_parity(Case(monai, (1, 1, 10, 14, 8), {"qkv_bias": bias}), attentions)


# --- patch mergings ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["PatchMerging", "PatchMergingV2"])
@pytest.mark.parametrize("grid", [(4, 6, 8), (5, 3, 1), (4, 6), (7, 1)])
def test_cells_are_merged_as_before(version, grid):
    nets = framework("monai.networks.nets.swin_unetr")
    merging = getattr(nets, version)(6, spatial_dims=len(grid)).double()
    x = torch.randn(2, *grid, 6, dtype=torch.float64)
    expected = gradients(merging, x)
    assert len(swin.patch(merging).mergings) == 1
    assert_same(gradients(merging, x), expected, 1e-12)


# --- norms ---------------------------------------------------------------------------------------


def test_every_norm_of_a_unet_is_one_call(norms):
    model, x = SMALL.model(), SMALL.input()
    expected = model(x)
    swin.patch(model)
    norms.clear()
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)
    assert len(norms) == 20
    assert sum(call["residual"] is not None for call in norms) == 10


def residual_block(in_channels=3, out_channels=4, norm_name="instance", **options):
    blocks = framework("monai.networks.blocks.dynunet_block")
    return blocks.UnetResBlock(2, in_channels, out_channels, 3, 1, norm_name, **options)


@pytest.mark.parametrize("in_channels", [3, 4])
def test_a_block_with_and_without_a_convolution_of_its_residual(in_channels, norms):
    block = residual_block(in_channels).double()
    x = torch.randn(2, in_channels, 9, 7, dtype=torch.float64)
    expected = gradients(block, x)
    swin.patch(block)
    norms.clear()
    assert_same(gradients(block, x), expected, 1e-12)
    assert [call.get("residual_eps") for call in norms] == [
        None,
        1e-5 if in_channels == 3 else None,
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"norm_name": "batch"},
        {"norm_name": ("instance", {"affine": True})},
        {"norm_name": ("instance", {"track_running_stats": True})},
        {"act_name": "relu"},
        {"act_name": ("leakyrelu", {"negative_slope": -0.2})},
    ],
    ids=str,
)
def test_other_norms_and_activations_stay(options):
    block = residual_block(**options)
    with pytest.warns(UserWarning, match="patched nothing"):
        assert swin.patch(block).norms == ()
    assert not isinstance(block, Swapped)


def test_a_norm_that_is_exchanged_later_is_obeyed(norms):
    block, x = residual_block(), torch.randn(2, 3, 9, 7)
    swin.patch(block)
    block.norm1 = torch.nn.BatchNorm2d(4)
    norms.clear()
    found = block(x)
    assert not norms
    swin.unpatch(block)
    assert torch.equal(block(x), found)


@pytest.mark.parametrize("watched", ["norm1", "norm3", "lrelu"])
def test_a_hook_on_a_norm_is_called(watched):
    block, x = residual_block(), torch.randn(2, 3, 9, 7)
    swin.patch(block)
    seen = []
    handle = getattr(block, watched).register_forward_hook(lambda *args: seen.append(args))
    found = block(x)
    assert seen
    handle.remove()
    torch.testing.assert_close(block(x), found)


def test_global_module_hooks_see_the_norms():
    block, x = residual_block(), torch.randn(2, 3, 9, 7)
    swin.patch(block)
    seen = set()
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *args: seen.add(type(module))
    )
    block(x)
    handle.remove()
    assert {torch.nn.InstanceNorm2d, torch.nn.LeakyReLU} <= seen


def test_a_forward_on_a_norm_is_obeyed():
    block, x = residual_block(), torch.randn(2, 3, 9, 7)
    swin.patch(block)
    block.norm1.forward = torch.zeros_like
    found = block(x)
    swin.unpatch(block)
    assert torch.equal(block(x), found)


def test_one_image_without_a_batch():
    block, x = residual_block(), torch.randn(3, 9, 7)
    expected = block(x)
    swin.patch(block)
    assert torch.equal(block(x), expected)


def test_a_block_that_another_release_lays_out_otherwise_is_left_alone():
    block = residual_block()
    block.activation = block.lrelu
    del block.lrelu
    with pytest.warns(UserWarning, match="patched nothing"):
        (entry,) = swin.patch(block).left_alone
    assert "AttributeError" in entry.what


def test_metadata_passes_through_a_norm(norms):
    from monai.data import MetaTensor

    block, x = residual_block(), torch.randn(2, 3, 9, 7)
    swin.patch(block)
    norms.clear()
    found = block(MetaTensor(x, meta={"name": "scan"}))
    assert norms
    assert type(found) is MetaTensor
    assert found.meta["name"] == "scan"
    torch.testing.assert_close(found.as_tensor(), block(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_unet_on_a_gpu_is_as_close_to_float64_as_the_original(dtype):
    """The decoder as well, whose many norms amplify rounding errors unpredictably."""

    def run(model, x):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            found = gradients(model, x)
        # In float16 the original's own gradients are not finite.
        return {"out": found["out"]} if dtype == torch.float16 else found

    tf32 = torch.backends.cudnn.flags(allow_tf32=False)
    with tf32:
        rounding = {torch.float32: 64 * 2**-24, torch.float16: 2**-8}.get(dtype, 2**-5)
        assert_as_close(errors(SMALL, run, "cuda"), rounding)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's own doing
def test_a_unet_on_a_gpu_may_be_graphed():
    """The graphs compute the same for other images."""
    model = SMALL.model().cuda().train()
    swin.patch(model)
    images = [torch.randn(SMALL.shape, device="cuda") for _ in range(3)]

    def gradients_of(image):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            out = model(image)
        out.float().square().mean().backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return torch.cat([out.float().flatten(), *[grad.flatten() for grad in found]]).detach()

    launched = [gradients_of(image) for image in images]
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        torch.cuda.make_graphed_callables(model, (images[0].clone(),), allow_unused_input=True)
    for image, expected in zip(images, launched, strict=True):
        assert (gradients_of(image) - expected).norm() < 1e-2 * expected.norm()
