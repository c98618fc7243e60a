"""Which implementation runs: an ordered list, a question to each, and the reasons."""

from __future__ import annotations

import importlib
from typing import Any

from ..device import DeviceInfo
from ..errors import UnsupportedError

__all__ = ["choose", "explain"]


def choose(
    package: str, names: tuple[str, ...], problem: Any, device: DeviceInfo, impl: str
) -> Any:
    """The first module of ``names`` that can run ``problem``; a named ``impl`` runs or raises."""
    if impl not in ("auto", *names):
        raise UnsupportedError(f"impl is {impl!r}, expected 'auto' or one of {', '.join(names)}")
    reasons = []
    for name in names if impl == "auto" else (impl,):
        module = _load(package, name)
        reason = module.supports(problem, device)
        if reason is None:
            return module
        reasons.append(f"{name} cannot run this: {reason}")
    raise UnsupportedError("; ".join(reasons) + ". Use impl='auto'" * (impl != "auto"))


def explain(package: str, names: tuple[str, ...], problem: Any, device: DeviceInfo) -> str:
    """One line for each implementation: yes, or no and why."""
    reasons = {name: _load(package, name).supports(problem, device) for name in names}
    return "\n".join(f"{name}: {f'no, {why}' if why else 'yes'}" for name, why in reasons.items())


def _load(package: str, name: str) -> Any:
    """Import an implementation when it is first asked about: Numba costs a second."""
    return importlib.import_module(f"{package}.{name}")
