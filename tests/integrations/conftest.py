"""Fixtures of the tests of the drop-ins."""

import pytest


@pytest.fixture
def attentions(monkeypatch):
    """Arguments of every call of ``pagetile.window_attention`` that a drop-in makes."""
    from pagetile.integrations.swin import attend

    calls = []
    call = attend.window_attention

    def window_attention(q, k, v, **options):
        calls.append({"q": q, **options})
        return call(q, k, v, **options)

    monkeypatch.setattr(attend, "window_attention", window_attention)
    return calls
