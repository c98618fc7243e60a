import warnings

import numba.core.caching
import pytest

from pagewise.tiles.cpu import compile


def test_kernels_run_where_they_cannot_be_kept(monkeypatch):
    compile._warn.cache_clear()
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        double = compile.entry()(lambda x: 2 * x)
    assert double(21) == 42
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        assert compile.entry()(lambda x: x + 1)(1) == 2
