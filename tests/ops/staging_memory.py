"""``ops/attention_scores/triton_staging`` in NumPy: shared memory for interpreted kernels."""

import ctypes

import numpy as np

SIZE, BASE = 1 << 17, 384


class StagingMemory:
    """Replaces the functions of the same names; programs are interpreted one by one."""

    def __init__(self):
        self.bytes = np.zeros(SIZE, np.uint8)
        self.end = 0
        self.is_fenced = True
        self.prefetched = []
        """Where each prefetch begins and ends."""

    def staging_address(self, size):
        """Memory for a program: full of bytes that no kernel stored."""
        self.bytes[:] = 0xFF
        self.end = BASE + _array(size).item() - 127  # the line may begin up to 127 bytes later
        assert self.end <= SIZE
        return BASE

    def store_eights(self, at, *numbers_and_aligned):
        *numbers, is_aligned = numbers_and_aligned
        self.store_some_eights(at, *numbers, None, is_aligned)

    def store_some_eights(self, at, *numbers_and_rest):
        *numbers, count, is_aligned = numbers_and_rest
        if is_aligned:
            assert (_array(at) % 16 == 0).all()
        counts = np.full(at.shape, 8) if count is None else _array(count)
        self.is_fenced = False
        for place, number in enumerate(numbers):
            values = _array(number)
            vector = 16 // values.itemsize if is_aligned else 1  # all of one, or nothing
            for start, value, left in zip(
                _array(at).ravel(), values.ravel(), counts.ravel(), strict=True
            ):
                if place // vector * vector < left:
                    begin = start + place * values.itemsize
                    assert begin % values.itemsize == 0
                    assert BASE <= begin <= begin + values.itemsize <= self.end
                    self.bytes[begin : begin + values.itemsize] = np.frombuffer(
                        value.tobytes(), np.uint8
                    )

    def copy_vectors(self, source, to, mask):
        self._copy(source, to, mask, 16)

    def copy_numbers(self, source, to, mask, bits):
        self._copy(source, to, mask, int(getattr(bits, "value", bits)) // 8)

    def bulk_store(self, source, to, size):
        (size,) = _array(size).ravel()
        assert size > 0
        assert _array(source).item() % 16 == _array(to).item() % 16 == size % 16 == 0
        self._move(_array(source).item(), _array(to).item(), size)

    def prefetch(self, at, size):
        (at,), (size,) = _array(at).ravel(), _array(size).ravel()
        assert at % 16 == size % 16 == 0
        self.prefetched.append((int(at), int(at + size)))

    def fence_staging(self, bulk):
        self.is_fenced = True

    def wait_bulk_stores(self):
        pass

    def _copy(self, source, to, mask, size):
        for start, address, is_in in zip(
            _array(source).ravel(), _array(to).ravel(), _array(mask).ravel(), strict=True
        ):
            if is_in:
                assert start % size == address % size == 0
                self._move(start, address, size)

    def _move(self, start, address, size):
        assert self.is_fenced
        assert BASE <= start <= start + size <= self.end
        chunk = self.bytes[start : start + size].tobytes()
        ctypes.memmove(int(address), chunk, int(size))


def _array(tensor):
    return np.asarray(tensor.handle.data)
