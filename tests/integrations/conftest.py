"""Slow tests wait until they are named: ``pytest -m slow tests/integrations``."""

import pytest


def pytest_collection_modifyitems(config, items):
    if "slow" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


@pytest.fixture
def attentions(monkeypatch):
    """Arguments of every call of ``pagewise.window_attention`` that a drop-in makes."""
    from pagewise.integrations.swin import attend

    calls = []
    call = attend.window_attention

    def window_attention(q, k, v, **options):
        calls.append({"q": q, **options})
        return call(q, k, v, **options)

    monkeypatch.setattr(attend, "window_attention", window_attention)
    return calls
