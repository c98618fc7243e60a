"""Kernels compiled once for given types and constants, and then launched without a look-up.

Triton's own call inspects every argument of every launch to find the compiled kernel, which takes
longer than a small kernel runs. Here the caller states types and divisibility, and keeps the
``Launcher``::

    launcher = Launcher(kernel, {"x": "*fp16:16", "stride": "i64:8"}, {"TILE": 1024}, num_warps=4)
    launcher((num_programs, 1, 1), x, stride)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.driver import driver

from ...device import DeviceInfo
from ..types import refuse_types

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs kernels on the CPU: ``TRITON_INTERPRET=1``."""

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
"""Triton's name of a pointer to elements of a type."""

PRODUCTS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""Triton's element types of products."""

OLDEST = (8, 0)


def refuse(device: DeviceInfo, **dtypes: torch.dtype) -> str | None:
    """Why Triton's kernels cannot take these element types on a device; None if they can."""
    if device.kind != "cuda" and not (INTERPRETED and device.kind == "cpu"):
        return f"the tensors are on {device.kind}"
    if device.kind == "cuda" and device.capability < OLDEST:
        have, need = (".".join(map(str, version)) for version in (device.capability, OLDEST))
        return f"{device.name} has compute capability {have}; {need} and later run"
    return refuse_types(**dtypes)


def begins_early(device: torch.device) -> bool:
    """Whether kernels on a device can be launched before the previous one ends (PDL).

    From compute capability 9.0 on. Every program of a kernel that is launched so must execute
    ``gdc_wait`` before it reads what another kernel writes, and before it writes anything.
    """
    return device.type == "cuda" and DeviceInfo.of(device).capability >= (9, 0)


def is_aligned(x: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in x.stride()[:-1])


def as_floats(biases: Tensor | None) -> Tensor | None:
    """ALiBi's slopes or sinks as contiguous float32, as kernels read them."""
    return None if biases is None else biases.detach().float().contiguous()


def window_of(sliding_window: int | None) -> int:
    """The kernels' ``window``, limited so that sums with positions fit in 32 bits.

    No sequence is as long as the limit, so it also means no window.
    """
    most = 1 << 30
    return most if sliding_window is None else min(sliding_window, most)


class Launcher:
    """A kernel compiled for given types, constants and options.

    Args:
        kernel: A ``triton.jit`` function whose constants come last.
        types: Types of its other parameters, in order: ``"*fp16"``, ``"i32"``; ``"*fp16:16"`` is
            a pointer to an address that is a multiple of 16, ``"i64:8"`` a multiple of 8.
        constants: Its ``tl.constexpr`` parameters, in their order.
        more_shared: Bytes of shared memory after those that Triton uses.
        **options: Options of the compiler, like ``num_warps``.
    """

    source: Any = ASTSource  # Gluon's launcher has another

    def __init__(
        self,
        kernel: Any,
        types: dict[str, str],
        constants: dict[str, Any],
        more_shared: int = 0,
        **options: Any,
    ) -> None:
        assert [*types, *constants] == list(kernel.arg_names), "in the kernel's order"
        self.kernel, self.types, self.constants, self.options = kernel, types, constants, options
        self.more_shared = more_shared
        self._values = tuple(constants.values())
        self._pointers = [at for at, kind in enumerate(types.values()) if kind[0] == "*"]
        self._loaded: dict[int, Any] = {}

    def compile(self, target: GPUTarget) -> Any:
        """Compile for a GPU, which need not be present; the result has ``asm["cubin"]``."""
        signature = {name: kind.partition(":")[0] for name, kind in self.types.items()}
        signature |= dict.fromkeys(self.constants, "constexpr")
        factors = [kind.partition(":")[2] for kind in self.types.values()]
        attributes = {
            (at,): [["tt.divisibility", int(factor)]] for at, factor in enumerate(factors) if factor
        }
        source = self.source(self.kernel, signature, self.constants, attributes)
        compiled = triton.compile(source, target=target, options=self.options)
        if self.more_shared:  # before loading, which requests it from the driver
            shared = compiled.metadata.shared + self.more_shared
            compiled.metadata = compiled.metadata._replace(shared=shared)
            compiled.packed_metadata = make_backend(target).pack_metadata(compiled.metadata)
        return compiled

    def bind(self, grid: tuple[int, int, int], *numbers: float) -> Launch:
        """Bind the grid and all arguments after the tensors, which are the first parameters."""
        return Launch(self, grid, numbers)

    def load(self, device: int) -> tuple[Any, tuple[Any, ...]]:
        """Triton's launch function on the current device, and its leading arguments."""
        loaded = self._loaded.get(device)
        if loaded is None:
            compiled = self.compile(driver.active.get_current_target())
            # As Triton's own call does from here on, without its profiler's three hooks.
            loaded = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
            self._loaded[device] = loaded
        return loaded

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch on the current stream of the device where the first argument, a tensor, is."""
        if 0 in grid:
            return
        if INTERPRETED:
            self.kernel[grid](*arguments, *self._values)
            return
        device = arguments[0].get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, *arguments)
            return
        run, before = self.load(device)
        # Pass addresses: for tensors Triton queries the driver at every launch.
        values = [*arguments, *self._values]
        for at in self._pointers:
            if values[at] is not None:
                values[at] = values[at].data_ptr()
        run(*grid, driver.active.get_current_stream(device), *before, *values)


class Launch:
    """The result of ``Launcher.bind``: a launch with the least possible host time."""

    def __init__(
        self, launcher: Launcher, grid: tuple[int, int, int], numbers: tuple[float, ...]
    ) -> None:
        self.launcher, self.grid = launcher, grid
        self._rest = (*numbers, *launcher.constants.values())
        self._loaded: dict[int, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *tensors: Any) -> None:
        """Launch on the current stream of the first tensor's device; others may be None."""
        device = tensors[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self.here(device, *tensors)
        else:
            self.here(device, *tensors)

    def here(self, device: int, *tensors: Any) -> None:
        """Launch on ``device``, which must be the current one."""
        if INTERPRETED:
            self.launcher.kernel[self.grid](*tensors, *self._rest)
            return
        loaded = self._loaded.get(device)
        if loaded is None:
            loaded = self._loaded[device] = _without_wrapping(*self.launcher.load(device))
        run, before = loaded
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(*self.grid, stream, *before, *addresses, *self._rest)


def _without_wrapping(run: Any, before: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Unwrap the compiled function that Triton 3.6 wraps, which saves a microsecond."""
    is_known = triton.__version__.startswith("3.6.")
    if not is_known or run.global_scratch_size or run.profile_scratch_size:
        return run, before
    function, *rest = before
    scratch = None, None
    return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, *scratch, *rest)
