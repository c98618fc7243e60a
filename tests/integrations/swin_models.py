"""Small Swin models of every framework, whose maps pad, shift and clamp."""

import sys
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch


def framework(name):
    """A framework's module, or a skip that says what is missing."""
    root = name.partition(".")[0]
    _load_torchvision()  # timm and Transformers import it as well, where it is installed
    try:
        return import_module(name)
    except ImportError as error:
        pytest.skip(f"{root} is not installed ({error}): pip install '.[swin-test]'")


def torchvision_loads():
    """Whether torchvision, where it is installed, imports without the help below."""
    return find_spec("torchvision") is None or hasattr(torch.ops.torchvision, "_cuda_version")


def _load_torchvision():
    """Import torchvision, also where its compiled part does not load.

    PyPI's wheel is built for CUDA. Beside a CPU build of torch its operators are missing, and of
    these two it registers fakes regardless. The models need none of them.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        import_module("torchvision")


@dataclass(frozen=True)
class Case:
    """A model and an input. ``scale`` multiplies the fresh weights that decide the scores."""

    build: object
    shape: tuple
    options: dict = field(default_factory=dict)

    def model(self, **more):
        """The model in evaluation mode, every parameter random: fresh ones have zero biases."""
        torch.manual_seed(0)
        model = self.build(**self.options, **more).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    def input(self):
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(1))


def monai(**options):
    nets = framework("monai.networks.nets.swin_unetr")
    dims = options.get("spatial_dims", 3)
    sizes = {"in_chans": 1, "embed_dim": 12, "window_size": (3,) * dims, "patch_size": (2,) * dims}
    stages = {"depths": (2, 2, 2, 2), "num_heads": (3, 3, 6, 6)}
    return nets.SwinTransformer(**sizes | stages | options)


def unetr(**options):
    nets = framework("monai.networks.nets")
    return nets.SwinUNETR(**{"in_channels": 1, "out_channels": 2, "feature_size": 12} | options)


def torchvision(version=1, **options):
    swin = framework("torchvision.models.swin_transformer")
    sizes = {"patch_size": [4, 4], "embed_dim": 24, "depths": [2, 2, 2], "num_heads": [3, 6, 12]}
    others = {"window_size": [7, 7], "num_classes": 5, "stochastic_depth_prob": 0.0}
    if version == 2:
        others["block"] = swin.SwinTransformerBlockV2
        others["downsample_layer"] = swin.PatchMergingV2
    return swin.SwinTransformer(**sizes | others | options)


def video(**options):
    swin = framework("torchvision.models.video.swin_transformer")
    sizes = {"patch_size": [2, 4, 4], "embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6]}
    others = {"window_size": [2, 4, 4], "num_classes": 5, "stochastic_depth_prob": 0.0}
    return swin.SwinTransformer3d(**sizes | others | options)


def timm(version=1, **options):
    models = framework("timm.models")
    sizes = {"img_size": (60, 92), "embed_dim": 24, "depths": (2, 2, 2), "num_heads": (3, 6, 12)}
    others = {"window_size": 7, "num_classes": 5, "drop_path_rate": 0.0}
    kind = (models.SwinTransformer, models.SwinTransformerV2)[version - 1]
    return kind(**sizes | others | options)


def transformers(version=1, **options):
    library = framework("transformers")
    kind = ("Swin", "Swinv2")[version - 1]
    sizes = {"image_size": 28, "patch_size": 2, "embed_dim": 16, "depths": [2, 2]}
    others = {"num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0}
    config = getattr(library, f"{kind}Config")(**sizes | others | options)
    return getattr(library, f"{kind}Model")(config)


def result(output):
    """The tensors that a model gives, as one."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, (list, tuple)):
        return torch.cat([each.flatten() for each in output])
    return output.last_hidden_state


def gradients(model, x):
    """The model's output, and the gradients of x and of every parameter, by name."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = result(model(x))
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    (out.flatten() * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {"out": out.detach(), "x": x.grad, **found}


CASES = {
    # Maps of 10, 5, 3 and 2 tokens: padded, padded, as long as a window, clamped.
    "monai-3d": Case(monai, (1, 1, 20, 16, 22)),
    "monai-2d": Case(monai, (2, 1, 28, 42), {"spatial_dims": 2, "window_size": (4, 4)}),
    "torchvision-v1": Case(torchvision, (2, 3, 60, 92)),
    "torchvision-v2": Case(torchvision, (2, 3, 60, 92), {"version": 2, "window_size": [6, 8]}),
    # Maps of 3 × 11 × 15 and 3 × 6 × 8: padded along every axis; then clamped along the first.
    "torchvision-video": Case(video, (2, 3, 6, 44, 60)),
    "torchvision-video-clamped": Case(video, (1, 3, 6, 44, 60), {"window_size": [4, 7, 5]}),
    "timm-v1": Case(timm, (2, 3, 60, 92)),
    "timm-v1-dynamic": Case(timm, (2, 3, 72, 120), {"dynamic_img_size": True, "head_dim": 12}),
    "timm-v2": Case(timm, (2, 3, 60, 92), {"version": 2}),
    "timm-v2-dynamic": Case(timm, (2, 3, 72, 120), {"version": 2, "dynamic_img_size": True}),
    "transformers-v1": Case(transformers, (2, 3, 28, 36)),
    "transformers-v2": Case(transformers, (2, 3, 28, 28), {"version": 2}),
    # The second stage's map of 4 is smaller than the window.
    "transformers-v2-clamped": Case(
        transformers, (2, 3, 16, 16), {"version": 2, "image_size": 16, "window_size": 6}
    ),
}
