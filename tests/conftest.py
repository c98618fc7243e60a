"""Set before torch starts its threads, and what the interpreter tier needs."""

import os

# Tests share their cores, and spinning threads do not.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config, items):
    """Triton decides when a kernel is imported whether it is interpreted: all tests or none."""
    kept, left = [], []
    for item in items:
        is_wanted = (item.get_closest_marker("interpret") is not None) == INTERPRETING
        (kept if is_wanted else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


if INTERPRETING:
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        """Triton 3.6 takes int() of an array of one number, which NumPy 2.4 refuses."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor
