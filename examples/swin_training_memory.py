"""Patch a Swin model and compare a training step before and after: time and peak memory.

::

    python examples/swin_training_memory.py --image 96 96 96 --width 48
    python examples/swin_training_memory.py --model transformers --image 512 512

The model is MONAI's SwinUNETR or Transformers' Swin. Each step runs in a process of its own,
because the peak memory of a process never falls.
"""

import argparse
import multiprocessing
import resource
import time

import torch

from pagetile.integrations import swin


def build(kind: str, image: list[int], width: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A model and a batch of one."""
    if kind == "monai":
        from monai.networks.nets import SwinUNETR

        model = SwinUNETR(in_channels=1, out_channels=2, feature_size=width)
        return model, torch.randn(1, 1, *image)
    from transformers import SwinConfig, SwinModel

    sizes = {"image_size": image, "patch_size": 2, "embed_dim": width, "depths": [2, 2]}
    model = SwinModel(SwinConfig(**sizes, num_heads=[3, 6], window_size=8))
    return model, torch.randn(1, 3, *image)


def step(kind: str, image: list[int], width: int, is_patched: bool) -> str:
    """Time and peak memory of a forward and backward pass, after one that warms up."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = (each.to(device) for each in build(kind, image, width))
    if is_patched:
        print(swin.patch(model), flush=True)
    for _ in range(2):
        start = time.perf_counter()
        output = model(x)
        output = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        output.square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"{seconds:.3f} s, at most {peak / 2**20:.0f} MiB on {device}"


def main() -> None:
    """Run a step of the original and of the patched model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["monai", "transformers"], default="monai")
    parser.add_argument("--image", type=int, nargs="+", default=[64, 64, 64], help="its sizes")
    parser.add_argument("--width", type=int, default=24, help="channels of the first stage")
    options = parser.parse_args()
    for name, is_patched in (("as it is", False), ("patched", True)):
        with multiprocessing.get_context("spawn").Pool(1) as process:
            work = options.model, options.image, options.width, is_patched
            try:
                print(f"{name}: {process.apply(step, work)}", flush=True)
            except (RuntimeError, ValueError) as error:  # such as an image smaller than a patch
                parser.error(f"the model {name} cannot run --image {options.image}: {error}")


if __name__ == "__main__":
    main()
