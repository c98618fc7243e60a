"""Region ids equal the mask's present content, whatever it was before."""

import copy
import pickle

import pytest
import torch
from swin_models import CASES, framework

from pagetile.integrations import swin
from pagetile.integrations.swin.masks import RegionMemory, dense_mask
from pagetile.ops.window_attention import shift_regions

GRID = ((8, 12), (4, 4), (2, 2))
CPU = torch.device("cpu")


def regions():
    return shift_regions(*GRID)


def said(arguments):
    """The dense mask that arguments of ``window_attention`` describe."""
    if "mask" in arguments:
        return arguments["mask"]
    return dense_mask(arguments["regions"]) * (arguments["mask_value"] / -100)


def test_a_dense_mask_and_its_regions_say_the_same():
    memory, mask = RegionMemory(), dense_mask(regions())
    assert memory.of_mask(None) == {}
    for form in (regions(), mask, mask / 8, mask.double()):
        arguments = memory.of_mask(form)
        assert "regions" in arguments
        expected = mask if form.dim() == 2 else form.float()
        torch.testing.assert_close(said(arguments), expected, rtol=0, atol=0)
    torch.testing.assert_close(said(memory.of_mask(mask, times=2)), 2 * mask, rtol=0, atol=0)
    torch.testing.assert_close(said(memory.of_mask(mask)), mask, rtol=0, atol=0)


def test_a_mask_of_another_form_stays_dense():
    memory, mask = RegionMemory(), torch.randn(4, 9, 9)
    assert memory.of_mask(mask)["mask"] is mask
    torch.testing.assert_close(memory.of_mask(mask, times=2)["mask"], 2 * mask)


def test_a_mask_is_read_once(monkeypatch):
    from pagetile.integrations.swin import masks

    times = []
    read = masks.regions_from_mask
    monkeypatch.setattr(masks, "regions_from_mask", lambda mask: times.append(1) or read(mask))
    memory, mask = RegionMemory(), dense_mask(regions())
    for _ in range(3):
        memory.of_mask(mask)
    assert len(times) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.zero_(),
        lambda mask: mask.mul_(0.5),
        lambda mask: mask[0].fill_(0),
        lambda mask: mask.copy_(dense_mask(shift_regions((8, 12), (4, 4), (1, 3)))),
    ],
)
def test_a_mask_changed_in_place_is_read_again(change):
    memory, mask = RegionMemory(), dense_mask(regions())
    memory.of_mask(mask)
    change(mask)
    torch.testing.assert_close(said(memory.of_mask(mask)), mask, rtol=0, atol=0)


def test_a_mask_in_the_memory_of_another_is_read_again():
    """An allocator reuses an address, and a new tensor's version counter starts at zero."""
    memory, storage = RegionMemory(), dense_mask(regions()).clone()
    first = torch.empty(0).set_(storage.untyped_storage(), 0, storage.shape)
    memory.of_mask(first)
    del first
    storage.mul_(0.5)
    second = torch.empty(0).set_(storage.untyped_storage(), 0, storage.shape)
    torch.testing.assert_close(said(memory.of_mask(second)), storage, rtol=0, atol=0)


def test_a_memory_keeps_no_mask_alive():
    import weakref

    memory, mask = RegionMemory(), dense_mask(regions())
    memory.of_mask(mask)
    alive = weakref.ref(mask)
    del mask
    assert alive() is None


def test_a_grid_is_known_by_its_numbers():
    memory = RegionMemory()
    first = memory.of_grid(*GRID, CPU)
    assert memory.of_grid(*GRID, CPU) is first
    assert torch.equal(first, regions())
    for other in [((12, 8), (4, 4), (2, 2)), ((8, 12), (2, 4), (1, 2)), ((8, 12), (4, 4), (1, 2))]:
        assert torch.equal(memory.of_grid(*other, CPU), shift_regions(*other))
    assert memory.of_grid(*GRID, torch.device("meta")).is_meta
    assert not memory.of_grid(*GRID, CPU).is_meta


def test_a_thread_that_replaces_the_regions_does_not_change_what_another_gets():
    """Between comparing the sizes and returning the regions, another thread may run."""
    memory, other = RegionMemory(), ((12, 8), (2, 4), (1, 2))

    class Interrupted(int):
        __hash__ = int.__hash__

        def __eq__(self, value):
            memory.of_grid(*other, CPU)
            return int(self) == value

    memory.of_grid(*GRID, CPU)
    (height, width), *rest = GRID
    found = memory.of_grid((Interrupted(height), width), *rest, CPU)
    assert torch.equal(memory.of_grid(*other, CPU), shift_regions(*other))
    assert torch.equal(found, regions())


def test_regions_made_under_a_mode_are_not_kept():
    from torch._subclasses import FakeTensorMode

    memory = RegionMemory()
    with torch.inference_mode():
        assert memory.of_grid(*GRID, CPU).is_inference()
    assert not memory.of_grid(*GRID, CPU).is_inference()
    memory = RegionMemory()
    with FakeTensorMode():
        memory.of_grid(*GRID, CPU)
    assert type(memory.of_grid(*GRID, CPU)) is torch.Tensor


def test_masks_of_inference_mode_stay_dense():
    """They have no version counter, so a cached result could be stale."""
    with torch.inference_mode():
        mask = dense_mask(regions())
        assert RegionMemory().of_mask(mask)["mask"] is mask


def test_copies_start_empty():
    memory = RegionMemory()
    memory.of_grid(*GRID, CPU)
    memory.of_mask(dense_mask(regions()))
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert other._grid is None
        assert other._mask is None


@pytest.mark.parametrize("name", ["monai-2d", "timm-v2-dynamic", "transformers-v1"])
def test_maps_of_changing_size(name):
    model, patched = CASES[name].model(), CASES[name].model()
    swin.patch(patched)
    channels = CASES[name].shape[1]
    for size in [(64, 48), (48, 64), (64, 48), (32, 32)]:
        x = torch.randn(1, channels, *size)
        with torch.no_grad():
            outputs = [each(x) for each in (model, patched)]
        for found, expected in zip(*map(tensors, outputs), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return [each for each in getattr(output, "to_tuple", lambda: output)() if each is not None]


@pytest.mark.filterwarnings("ignore::UserWarning")  # timm resizes tables in an old way
def test_timm_resized_after_patching():
    framework("timm.models")
    for name in ("timm-v1", "timm-v2"):
        model, patched = CASES[name].model(), CASES[name].model()
        swin.patch(patched)
        for size in [(60, 92), (100, 76)]:
            x = torch.randn(1, 3, *size)
            with torch.no_grad():
                for each in (model, patched):
                    each.set_input_size(size)
                torch.testing.assert_close(patched(x), model(x), rtol=1e-4, atol=1e-4)


def test_inference_then_training():
    """Tensors made in inference mode must not be saved for a gradient."""
    for name in ("monai-2d", "timm-v1", "timm-v2", "torchvision-v1", "transformers-v2"):
        model, x = CASES[name].model(), CASES[name].input()
        swin.patch(model)
        with torch.inference_mode():
            model(x)
        sum(each.sum() for each in tensors(model(x))).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
