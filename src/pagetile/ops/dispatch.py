"""Choice of an implementation: the first module of an ordered list that supports a problem."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from dataclasses import replace
from typing import Any

from ..device import DeviceInfo
from ..errors import UnsupportedError

_DEVICES = {"cpu": "cpu", "triton": "cuda", "hopper": "cuda"}
"""The device type of an implementation, by the first word of its name. It is not imported for
other devices."""

_NEW_ENOUGH = (9, 0)
"""A compute capability that satisfies every kernel."""


@functools.lru_cache(maxsize=4096)
def choose(
    package: str, names: tuple[str, ...], problem: Any, device: DeviceInfo, impl: str
) -> Any:
    """Return the first module of ``names`` that can run ``problem``; a named one runs or raises.

    Only a named one may run on another device type: GPU kernels interpreted on a CPU.
    """
    if impl not in ("auto", *names):
        raise UnsupportedError(f"impl is {impl!r}, expected 'auto' or one of {', '.join(names)}")
    reasons: list[str] = []
    for name in names if impl == "auto" else (impl,):
        reason = _find_reason(package, name, problem, device, impl == name)
        if reason is None:
            if reasons and name == "reference" and device.kind == "cuda":
                why = _device_reason(package, names, problem, device)
                if why is not None:
                    _warn_once(device, why)
            return _load(package, name)
        reasons.append(f"{name} cannot run this: {reason}")
    raise UnsupportedError("; ".join(reasons) + ". Use impl='auto'" * (impl != "auto"))


def _device_reason(
    package: str, names: tuple[str, ...], problem: Any, device: DeviceInfo
) -> str | None:
    """Return why none of the kernels runs, if a newer GPU would run one; else None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    newer = replace(device, capability=max(device.capability, _NEW_ENOUGH))
    for name in reversed(names):  # the last one has the lowest requirements
        reason = _find_reason(package, name, problem, device, False)
        if reason is not None and _find_reason(package, name, problem, newer, False) is None:
            return reason
    return None


@functools.cache
def _warn_once(device: DeviceInfo, why: str) -> None:
    """Warn once for each device and reason."""
    warnings.warn(
        f"none of pagetile's kernels can run this on this GPU ({device.name}): {why}; the "
        "reference runs instead, which is slow and waits for the GPU",
        RuntimeWarning,
        stacklevel=5,
    )


def explain(package: str, names: tuple[str, ...], problem: Any, device: DeviceInfo) -> str:
    """Return one line for each implementation: yes, or no and why."""
    reasons = {name: _find_reason(package, name, problem, device, False) for name in names}
    return "\n".join(f"{name}: {f'no, {why}' if why else 'yes'}" for name, why in reasons.items())


def _find_reason(
    package: str, name: str, problem: Any, device: DeviceInfo, is_named: bool
) -> str | None:
    """Return why an implementation cannot run; None if it can, as the reference always can."""
    if name == "reference":
        return None
    if not is_named and _DEVICES.get(name.partition("_")[0], device.kind) != device.kind:
        return f"the tensors are on {device.kind}"
    try:
        module = _load(package, name)
    except ImportError as error:
        return f"it needs {error.name}, which cannot be imported ({error}): install it"
    reason: str | None = module.supports(problem, device)
    return reason


@functools.cache
def _load(package: str, name: str) -> Any:
    """Import an implementation when it is first needed: importing Numba takes a second."""
    return importlib.import_module(f"{package}.{name}")
