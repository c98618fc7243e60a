"""Tests of an operation are written for the CPU; here they reach a GPU's implementations."""

from contextlib import contextmanager

import pytest
import torch

ROUNDED_WRONGLY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(scope="session")
def mirror():
    return mirrored


@contextmanager
def mirrored(*tensors, impl, rounds=True):
    """The tensors where ``impl`` can run; what is written to them there comes back.

    Views of one memory stay views of one memory, with their strides. What only copies numbers,
    and ``rounds`` none, is right for bfloat16 under the interpreter, too.
    """
    on_gpu = impl == "triton" and torch.cuda.is_available()
    is_wrong = any(tensor.dtype in ROUNDED_WRONGLY for tensor in tensors)
    if impl == "triton" and not on_gpu and rounds and is_wrong:
        pytest.skip("Triton 3.6's interpreter does not round to bfloat16 and float8 as a GPU does")
    if not on_gpu:
        yield tensors
        return
    homes = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    memories = {
        at: torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).cuda()
        for at, tensor in homes.items()
    }
    yield tuple(
        torch.tensor([], dtype=tensor.dtype, device="cuda").set_(
            memories[tensor.untyped_storage().data_ptr()].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        for tensor in tensors
    )
    for at, tensor in homes.items():
        home = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
        home.copy_(memories[at])
