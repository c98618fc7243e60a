"""Patching can be undone, falls back where it has to, and compares each module before patching."""

import copy
import io
import pickle
import sys
import threading

import pytest
import torch
from swin_models import CASES, framework, gradients, result, transformers

from pagetile import DTypeError, UnsupportedError
from pagetile.integrations import swin
from pagetile.integrations.swin.swapped import Swapped, SwappedAttention, SwappedLayer

ONE_EACH = ["monai-3d", "torchvision-v1", "torchvision-v2", "timm-v1-dynamic", "timm-v2"]
ONE_EACH += ["transformers-v1", "transformers-v2", "torchvision-video"]


def run(name, model):
    with torch.no_grad():
        return result(model(CASES[name].input()))


def run_in(model, x):
    with torch.no_grad():
        return result(model(x))


def snapshot(model):
    """Classes, attribute names, parameters and buffers of a model."""
    return {
        name: (type(module), sorted(vars(module)), [*module._parameters.items()],
               [(key, id(value)) for key, value in module._buffers.items()])
        for name, module in model.named_modules()
    }  # fmt: skip


@pytest.fixture(params=ONE_EACH)
def name(request):
    return request.param


# --- what stays, and what comes back ------------------------------------------------------------


def test_the_state_dict_stays(name):
    model = CASES[name].model()
    before = model.state_dict()
    swin.patch(model)
    run(name, model)
    after = model.state_dict()
    assert [*before] == [*after]
    assert all(before[key].data_ptr() == after[key].data_ptr() for key in before)
    assert not model.load_state_dict(before).missing_keys


def test_unpatch_restores_exactly(name):
    model = CASES[name].model()
    before, out = snapshot(model), run(name, model)
    swin.patch(model)
    run(name, model)
    assert snapshot(model) != before
    swin.unpatch(model)
    assert snapshot(model) == before
    assert torch.equal(run(name, model), out)


def test_patching_twice_is_patching_once(name):
    model = CASES[name].model()
    report, once = swin.patch(model), snapshot(model)
    assert swin.patch(model) == report
    assert snapshot(model) == once
    swin.unpatch(model)
    assert not any(isinstance(module, Swapped) for module in model.modules())
    swin.unpatch(model)


def test_patched_restores_only_what_it_patched():
    model = CASES["transformers-v1"].model()
    before = snapshot(model)
    with swin.patched(model) as report:
        assert len(report.attentions) == 4
        assert snapshot(model) != before
    assert snapshot(model) == before
    with pytest.raises(ValueError, match="unpack"), swin.patched(model):
        model(torch.randn(1, 2, 3))
    assert snapshot(model) == before
    first = model.encoder.layers[0]
    swin.patch(first)
    before = snapshot(model)
    with swin.patched(model):
        assert snapshot(model) != before
        with swin.patched(model):
            pass
        assert snapshot(model) != before
    assert snapshot(model) == before


def test_a_patched_model_is_its_frameworks(name):
    model = CASES[name].model()
    kinds = [type(module) for module in model.modules()]
    swin.patch(model)
    assert all(map(isinstance, model.modules(), kinds))


def test_copies_are_patched_and_stand_alone(name):
    model = CASES[name].model()
    swin.patch(model)
    out = run(name, model)
    twin = copy.deepcopy(model)
    assert torch.equal(run(name, twin), out)
    swin.unpatch(model)
    assert any(isinstance(module, SwappedAttention) for module in twin.modules())
    assert torch.equal(run(name, twin), out)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(run(name, twin), out)


def test_pickles_are_patched(name):
    model = CASES[name].model()
    report = swin.patch(model)
    out = run(name, model)
    other = pickle.loads(pickle.dumps(model))
    assert swin.patch(other) == report
    assert torch.equal(run(name, other), out)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(run(name, torch.load(file, weights_only=False)), out)


def test_replacement_classes_shadow_no_attribute_of_the_frameworks(name):
    """A shadowed attribute would change the behaviour of the framework's code."""
    own = {key for kind in (Swapped, SwappedAttention, SwappedLayer) for key in vars(kind)}
    own = {key for key in own if not key.startswith("__")} | {"_regions"}
    for module in CASES[name].model().modules():
        names = {*dir(module)} | {*module._modules} | {*module._buffers}
        assert not own & names, type(module)


def test_threads_share_a_patched_model():
    """Each thread has its own map size, so they compete for the cache of region ids."""
    model = CASES["timm-v2-dynamic"].model()
    sizes = [(72, 120), (64, 88), (96, 72), (40, 120)]
    images = [torch.randn(1, 3, *size) for size in sizes]
    swin.patch(model)
    with torch.no_grad():
        expected = [model(image) for image in images]
    wrong = []

    def work(image, out):
        with torch.no_grad():
            if not all(torch.equal(model(image), out) for _ in range(5)):
                wrong.append(image.shape)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(images, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- where it falls back  -----------------------------------------------------------------------


def operators(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "name", ["torchvision-v2", "torchvision-video", "timm-v1", "timm-v2", "transformers-v2"]
)
@pytest.mark.parametrize("strict", [False, True])
def test_export_sees_the_original(name, strict):
    """One stage: a block that is shifted, and one that is not."""
    case = CASES[name]
    model, x = case.model(depths=[2], num_heads=[2]), case.input()
    before = operators(torch.export.export(model, (x,), strict=strict).graph)
    swin.patch(model)
    after = operators(torch.export.export(model, (x,), strict=strict).graph)
    assert after == before
    assert not any("pagetile" in operator for operator in after)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["monai-2d", "torchvision-v1", "timm-v1-dynamic"])
def test_tracing_sees_the_original(name):
    model, x = CASES[name].model(), CASES[name].input()
    before = str(torch.jit.trace(model, x, check_trace=False).inlined_graph)
    swin.patch(model)
    after = str(torch.jit.trace(model, x, check_trace=False).inlined_graph)
    assert "pagetile::" not in after
    assert after.count("aten::softmax") == before.count("aten::softmax") > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["torchvision-v1", "torchvision-v2", "timm-v1"])
def test_scripting_unpatches(name):
    model, x = CASES[name].model(), CASES[name].input()
    expected = model(x)
    swin.patch(model)
    scripted = torch.jit.script(model)
    assert "pagetile" not in str(scripted.inlined_graph)
    torch.testing.assert_close(scripted(x), expected, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, Swapped) for module in model.modules())
    assert swin.patch(model).attentions


def test_symbolic_tracing_sees_the_original():
    model = CASES["torchvision-v2"].model()
    swin.patch(model)
    graph = torch.fx.symbolic_trace(model)
    assert any("shifted_window_attention" in str(node.target) for node in graph.graph.nodes)
    x = CASES["torchvision-v2"].input()
    torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-5)


def test_functional_transforms_see_the_original(attentions):
    model, x = CASES["timm-v2"].model(), CASES["timm-v2"].input()
    swin.patch(model)
    expected = model(x)
    attentions.clear()
    found = torch.func.vmap(lambda image: model(image[None])[0], randomness="error")(x)
    assert not attentions
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


DROPOUTS = {
    "monai-3d": "attn_drop_rate",
    "torchvision-v1": "attention_dropout",
    "torchvision-v2": "attention_dropout",
    "torchvision-video": "attention_dropout",
    "timm-v1-dynamic": "attn_drop_rate",
    "timm-v2": "attn_drop_rate",
    "transformers-v1": "attention_probs_dropout_prob",
    "transformers-v2": "attention_probs_dropout_prob",
}


def test_training_with_attention_dropout_runs_the_original(name, attentions):
    model = CASES[name].model(**{DROPOUTS[name]: 0.5}).train()
    x = CASES[name].input()
    torch.manual_seed(3)
    expected = gradients(model, x)
    report = swin.patch(model)
    assert all("its own code while training" in entry.what for entry in report.attentions)
    attentions.clear()
    torch.manual_seed(3)
    found = gradients(model, x)
    assert not attentions
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    run(name, model.eval())
    assert len(attentions) == len(report.attentions)


def test_dropout_modules_in_training_mode_run_the_original(name):
    """Monte-Carlo dropout puts only the dropout modules into training mode."""
    model = CASES[name].model(**{DROPOUTS[name]: 0.5}).eval()
    for module in model.modules():
        module.train(isinstance(module, torch.nn.Dropout))
    torch.manual_seed(3)
    expected = run(name, model)
    swin.patch(model)
    torch.manual_seed(3)
    torch.testing.assert_close(run(name, model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("monai-3d", "softmax"),
        ("monai-3d", "attn_drop"),
        ("timm-v1-dynamic", "softmax"),
        ("timm-v2", "attn_drop"),
        ("transformers-v1", "relative_position_bias"),
        ("transformers-v2", "dropout"),
    ],
)
def test_hooks_on_parts_of_an_attention_are_called(name, part, attentions):
    model, calls = CASES[name].model(), []
    swin.patch(model)
    [first, *others] = [m for m in model.modules() if isinstance(m, SwappedAttention)]
    getattr(first, part).register_forward_hook(lambda *given: calls.append(given))
    attentions.clear()
    run(name, model)
    assert calls
    assert len(attentions) == len(others)


@pytest.mark.parametrize("first", [True, False])
def test_an_attention_with_another_part_proves_itself(first):
    model = CASES["monai-3d"].model()
    all_of_them = [each for each in model.modules() if hasattr(each, "attn_drop")]
    all_of_them[0 if first else -1].softmax = torch.nn.Tanh()
    expected = run("monai-3d", model)
    report = swin.patch(model)
    torch.testing.assert_close(run("monai-3d", model), expected, rtol=1e-4, atol=1e-5)
    assert len(report.attentions) == len(all_of_them) - 1


def test_a_class_derived_from_a_patched_one_is_not_unpatched():
    from torch.nn.utils import parametrize

    name = "timm-v2"
    model = CASES[name].model()
    expected = run(name, model)
    swin.patch(model)
    attention = next(each for each in model.modules() if isinstance(each, SwappedAttention))
    parametrize.register_parametrization(attention, "logit_scale", torch.nn.Identity())
    with pytest.raises(UnsupportedError, match="is derived from a patched class: undo that first"):
        swin.unpatch(model)
    torch.testing.assert_close(run(name, model), expected, rtol=1e-4, atol=1e-5)
    parametrize.remove_parametrizations(attention, "logit_scale")
    swin.unpatch(model)
    assert torch.equal(run(name, model), expected)


@pytest.mark.parametrize("name", ["torchvision-v1", "torchvision-v2", "torchvision-video"])
def test_an_empty_batch_gives_an_empty_batch(name):
    model, x = CASES[name].model(), CASES[name].input()
    expected = model(x[:0]).shape
    swin.patch(model)
    assert model(x[:0]).shape == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_forward_mode_runs_the_original(attentions):
    from torch.autograd import forward_ad

    name = "torchvision-v1"
    model, x = CASES[name].model().requires_grad_(False), CASES[name].input()

    def tangent():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent

    expected = tangent()
    swin.patch(model)
    attentions.clear()
    assert torch.equal(tangent(), expected)
    assert not attentions


@pytest.mark.parametrize("name", ["transformers-v1", "transformers-v2"])
def test_requested_attention_weights_come_from_the_original(name, attentions):
    model, x = CASES[name].model(attn_implementation="eager"), CASES[name].input()
    expected = model(x, output_attentions=True).attentions
    assert expected
    swin.patch(model)
    attentions.clear()
    found = model(x, output_attentions=True).attentions
    assert not attentions
    assert all(map(torch.equal, found, expected))


def test_a_registered_attention_of_the_user_is_kept(attentions):
    from transformers import AttentionInterface

    def mine(module, query, key, value, mask, **options):
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register("mine", mine)
    try:
        model = CASES["transformers-v1"].model()
        swin.patch(model)
        attentions.clear()
        model.set_attn_implementation("mine")
        run("transformers-v1", model)
        assert not attentions
    finally:
        del AttentionInterface._global_mapping["mine"]


def test_second_derivatives_say_to_unpatch():
    model, x = transformers(), torch.randn(1, 3, 28, 28, requires_grad=True)
    swin.patch(model)
    [gradient] = torch.autograd.grad(result(model(x)).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"has no derivative.*swin\.unpatch\(model\)"):
        gradient.square().sum().backward()
    swin.unpatch(model)
    [gradient] = torch.autograd.grad(result(model(x)).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


def test_a_window_that_does_not_fit_its_table_fails_as_before():
    """Transformers' Swin cuts windows down to small maps, but not their biases."""
    model = transformers(image_size=20, depths=[1, 1], window_size=7)
    x = torch.randn(1, 3, 20, 20)
    with pytest.raises(RuntimeError) as before:
        model(x)
    swin.patch(model)
    with pytest.raises(RuntimeError) as after:
        model(x)
    assert str(after.value) == str(before.value)


def test_a_layer_gives_dense_masks_to_an_attention_that_was_unpatched():
    for name in ("monai-3d", "timm-v1-dynamic", "transformers-v1", "transformers-v2"):
        model = CASES[name].model()
        expected = run(name, model)
        swin.patch(model)
        for module in list(model.modules()):
            if isinstance(module, SwappedAttention):
                swin.unpatch(module)
        torch.testing.assert_close(run(name, model), expected, rtol=0, atol=0)


# --- what it leaves alone -----------------------------------------------------------------------


def test_a_release_that_computes_something_else_is_left_alone(name, monkeypatch):
    model = CASES[name].model()
    kinds = {type(module) for module in model.modules()}
    swin.patch(model)
    kinds &= {module.original for module in model.modules() if isinstance(module, SwappedAttention)}
    swin.unpatch(model)
    (kind,) = kinds
    forward = kind.forward

    def colder(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        return (out[0] * 1.001, *out[1:]) if isinstance(out, tuple) else out * 1.001

    monkeypatch.setattr(kind, "forward", colder)
    expected = run(name, model)
    with pytest.warns(UserWarning, match="patched (nothing|no window attention) in .*differ by"):
        report = swin.patch(model)
    assert not report.attentions
    assert not report.layers
    assert all("computes something else" in entry.what for entry in report.left_alone)
    assert torch.equal(run(name, model), expected)


def test_a_release_with_another_mask_is_left_alone(monkeypatch):
    model = CASES["transformers-v1"].model()
    kind = type(model.encoder.layers[0].blocks[1])
    make = kind.get_attn_mask

    def twice(*args, **kwargs):
        mask = make(*args, **kwargs)
        return None if mask is None else 2 * mask

    monkeypatch.setattr(kind, "get_attn_mask", twice)
    expected = run("transformers-v1", model)
    report = swin.patch(model)
    assert len(report.attentions) == 4
    assert not report.layers
    assert len(report.left_alone) == 2
    torch.testing.assert_close(run("transformers-v1", model), expected, rtol=1e-4, atol=1e-5)


def test_a_trial_that_fails_is_the_reason(monkeypatch):
    model = CASES["transformers-v1"].model()
    kind = type(model.encoder.layers[0].blocks[0].attention)
    monkeypatch.setattr(kind, "forward", lambda self: None)
    with pytest.warns(UserWarning, match="patched nothing.*TypeError"):
        assert "TypeError" in swin.patch(model).left_alone[0].what


def test_a_release_with_another_structure_is_left_alone(monkeypatch):
    model = CASES["transformers-v1"].model()
    kind = type(model.encoder.layers[0].blocks[0].attention)
    model.encoder.layers[0].blocks[0].attention.relative_position_bias = None
    left = swin.patch(model).left_alone
    assert [entry.name for entry in left] == ["encoder.layers.0.blocks.0.attention"]
    assert "another structure" in left[0].what

    swin.unpatch(model)
    monkeypatch.delitem(sys.modules, "pagetile.integrations.swin.frameworks.transformers")
    monkeypatch.delattr(sys.modules[kind.__module__], "SwinAttention")
    with pytest.warns(UserWarning, match="patched nothing"):
        report = swin.patch(model)
    assert not report.attentions
    assert all("is not supported" in entry.what for entry in report.left_alone)


def test_a_forward_on_the_instance_is_left_alone():
    model = CASES["transformers-v1"].model()
    attention = model.encoder.layers[0].blocks[1].attention
    attention.forward = attention.forward
    report = swin.patch(model)
    assert [entry.name for entry in report.left_alone] == ["encoder.layers.0.blocks.1.attention"]
    assert "replaced" in report.left_alone[0].what
    assert len(report.attentions) == 3
    assert [entry.name for entry in report.layers] == ["encoder.layers.1.blocks.1"]


def test_subclasses_and_unsupported_classes_are_left_alone():
    library = framework("transformers")
    model = CASES["transformers-v1"].model()
    attention = model.encoder.layers[0].blocks[0].attention
    attention.__class__ = type("Mine", (type(attention),), {})
    left = swin.patch(model).left_alone
    assert len(left) == 1
    assert "Mine is a subclass" in left[0].what
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [1]}
    donut = library.DonutSwinModel(library.DonutSwinConfig(**sizes, window_size=4))
    with pytest.warns(UserWarning, match="patched nothing"):
        report = swin.patch(donut)
    assert not report.attentions
    assert "transformers.models.donut" in report.left_alone[0].what
    assert "is not supported" in report.left_alone[0].what


def test_meta_parameters_are_left_alone():
    with torch.device("meta"):
        model = transformers()
    with pytest.warns(UserWarning, match="patched nothing"):
        report = swin.patch(model)
    assert not report.attentions
    assert all("meta device" in entry.what for entry in report.left_alone)


@pytest.fixture
def mesh(tmp_path):
    """A mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# torch's own: it registers a hook for the output of a call under no_grad, too.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_is_patched_before_it_is_sharded(mesh, attentions):
    from torch.distributed.fsdp import fully_shard

    def shard(model):
        for block in [m for m in model.modules() if type(m).__name__ == "SwinTransformerBlock"]:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    # In float64: float32's CPU kernels read tensors through NumPy, after which torch cannot resize
    # their storage, as fully_shard does.
    model, x = CASES["monai-3d"].model().double(), CASES["monai-3d"].input().double()
    expected = run_in(model, x)
    report = swin.patch(shard(copy.deepcopy(model)))
    assert not report.attentions
    assert "of type DTensor: patch before they are sharded" in report.left_alone[0].what
    assert len(swin.patch(model).attentions) == 8
    shard(model)
    attentions.clear()
    result(model(x)).sum().backward()
    assert len(attentions) == 8
    torch.testing.assert_close(run_in(model, x), expected)


def test_patching_draws_no_random_numbers_and_changes_no_mode(name):
    model = CASES[name].model().train()
    state = torch.random.get_rng_state()
    swin.patch(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(module.training for module in model.modules())


def test_patching_ignores_default_device_and_autocast():
    model = transformers()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert len(swin.patch(model).attentions) == 4


@pytest.mark.parametrize("patch", [swin.patch, lambda model: swin.patched(model).__enter__()])
def test_patching_nothing_warns(patch):
    with pytest.warns(
        UserWarning,
        match=r"patched nothing in Linear: it has no window attention.*import the framework first",
    ):
        report = patch(torch.nn.Linear(2, 2))
    first, second = str(report).splitlines()
    assert first == "patched nothing; left nothing alone"
    assert second.startswith("  supported: MONAI's SwinUNETR")


def test_the_warning_names_the_first_reason():
    with torch.device("meta"):
        model = transformers()
    with pytest.warns(
        UserWarning,
        match=r"patched nothing in SwinModel: left 4 modules alone, .*"
        r"encoder.layers.0.blocks.0.attention: its parameters are on the meta"
        r".*shifted_window_attention itself",
    ):
        report = swin.patch(model)
    assert str(report).splitlines()[0] == "patched nothing; left 4 modules alone"


def test_patching_a_patched_model_does_not_warn():
    model = transformers()
    swin.patch(model)
    assert swin.patch(model).attentions


def test_the_report_names_every_module():
    model = CASES["transformers-v1"].model()
    words = str(swin.patch(model)).splitlines()
    assert words[0] == "patched 4 window attentions, 2 layers; left nothing alone"
    assert words[1] == "attention on pagetile.window_attention: 4 window attentions"
    assert words[2] == (
        "  encoder.layers.0.blocks.0.attention: Transformers Swin, window 4×4, 2 heads of 8"
    )
    assert words[6] == "region ids instead of dense masks: 2 layers"


# --- memory --------------------------------------------------------------------------------------


class Squares(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the shapes of operations' results with two dimensions of a window's tokens."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.squares = sizes, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dim() > 1:
                rows, columns = tensor.shape[-2:]
                if rows == columns and rows in self.sizes:
                    self.squares.append(tuple(tensor.shape))
        return out


@pytest.mark.parametrize(
    "name", ["monai-3d", "torchvision-v1", "timm-v1-dynamic", "timm-v2-dynamic", "transformers-v2"]
)
def test_no_operation_forms_scores_or_dense_masks(name):
    case = CASES[name]
    wider = {"embed_dim": 24} if name == "transformers-v2" else {}  # than a window has tokens
    model, x = case.model(**wider), case.input()
    tokens = {"monai-3d": {27}, "transformers-v2": {16}}.get(name, {49})
    with Squares(tokens) as before:
        gradients(model, x)
    assert before.squares
    swin.patch(model)
    with Squares(tokens) as after:
        gradients(model, x)
    assert not after.squares


@pytest.mark.parametrize("call", [swin.patch, swin.unpatch])
def test_patching_something_else_than_a_module_raises(call):
    with pytest.raises(DTypeError, match=r"model is of type str, expected a torch.nn.Module"):
        call("swin")
