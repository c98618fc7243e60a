"""Offsets and regions against the index and the mask that Swin implementations store."""

import itertools
import math

import pytest
import torch

from pagetile import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    regions_from_mask,
    rel_offsets,
    shift_regions,
)


def swin_index(window):
    """The N × N index, as every Swin builds it: pairwise differences of coordinates."""
    coordinates = torch.cartesian_prod(*(torch.arange(n) for n in window)).view(-1, len(window))
    index = torch.zeros(len(coordinates), len(coordinates), dtype=torch.long)
    for axis, size in enumerate(window):
        steps = coordinates[:, None, axis] - coordinates[None, :, axis] + size - 1
        index = index * (2 * size - 1) + steps
    return index


def swin_mask(grid, window, shift):
    """The dense mask, as every Swin builds it: number the regions, cut windows, compare pairs."""
    numbers = torch.zeros(grid)
    slices = [
        (slice(0, -w), slice(-w, -s), slice(-s, None)) if s else (slice(None),)
        for w, s in zip(window, shift, strict=True)
    ]
    for number, where in enumerate(itertools.product(*slices)):
        numbers[where] = number
    cut = [n for g, w in zip(grid, window, strict=True) for n in (g // w, w)]
    axes = len(grid)
    order = [*range(0, 2 * axes, 2), *range(1, 2 * axes, 2)]
    windows = numbers.view(cut).permute(order).reshape(-1, math.prod(window))
    return (windows[:, :, None] != windows[:, None, :]).float() * -100


@pytest.mark.parametrize("window", [(7,), (7, 7), (3, 5), (7, 7, 7), (2, 3, 4), (1, 1)])
def test_differences_of_offsets_are_the_index(window):
    u = rel_offsets(window).long()
    centre = (math.prod(2 * n - 1 for n in window) - 1) // 2
    assert torch.equal(u[:, None] - u[None, :] + centre, swin_index(window))


def test_a_clamped_window_takes_the_first_offsets_of_the_whole():
    u, index = rel_offsets((7, 7, 7), num_tokens=216).long(), swin_index((7, 7, 7))[:216, :216]
    assert torch.equal(u[:, None] - u[None, :] + (13**3 - 1) // 2, index)


def test_a_small_window_in_a_large_table_keeps_true_offsets():
    u = rel_offsets((2, 3), table_window=(4, 4))
    table = torch.arange(49).view(7, 7)  # centre 24
    for i, j in itertools.product(range(6), repeat=2):
        steps = i // 3 - j // 3, i % 3 - j % 3
        assert u[i] - u[j] + 24 == table[3 + steps[0], 3 + steps[1]]


@pytest.mark.parametrize(
    ("grid", "window", "shift"),
    [
        ((8,), (4,), (2,)),
        ((14, 21), (7, 7), (3, 3)),
        ((6, 8), (3, 4), (0, 2)),
        ((4, 4), (4, 4), (0, 0)),
        ((6, 4, 8), (3, 2, 4), (1, 1, 2)),
        ((4, 6, 4), (4, 3, 2), (0, 1, 0)),
        ((14, 14, 14), (7, 7, 7), (3, 3, 3)),
    ],
)
def test_regions_compare_as_the_mask(grid, window, shift):
    regions, mask = shift_regions(grid, window, shift), swin_mask(grid, window, shift)
    same = regions[:, :, None] == regions[:, None, :]
    assert regions.dtype == torch.uint8
    assert torch.equal((~same).float() * -100, mask)
    again = regions_from_mask(mask)
    assert torch.equal(again[:, :, None] == again[:, None, :], same)


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[[0.0, -1.0], [-2.0, 0.0]]]),
        torch.tensor([[[0.0, -1.0], [0.0, 0.0]]]),
        torch.tensor([[[-1.0, -1.0], [-1.0, 0.0]]]),
    ],
    ids=["two values", "one-sided", "blind to itself"],
)
def test_a_mask_that_is_no_regions_is_refused(mask):
    with pytest.raises(ShapeError, match="pass it to window_attention as mask"):
        regions_from_mask(mask)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rel_offsets((3, 3), table_window=(2, 4)), r"window is \[3, 3\].*\[2, 4\]"),
        (
            lambda: rel_offsets((0, 7)),
            r"window is \(0, 7\), expected .* at least 1",
        ),
        (lambda: rel_offsets((7.0, 7)), r"window is \(7.0, 7\), expected an integer"),
        (lambda: rel_offsets((2, 2), (-3, 3)), r"table_window is \(-3, 3\), expected an integer"),
        (lambda: rel_offsets((7, 7), num_tokens=-1), "num_tokens is -1, expected at least 1"),
        (lambda: rel_offsets((3, 3), table_window=(3,)), "table_window"),
        (lambda: rel_offsets((3, 3), num_tokens=10), "num_tokens is 10.*the 9"),
        (lambda: shift_regions((7, 6), (3, 3), (1, 1)), r"grid=\[7, 6\] is not a multiple"),
        (lambda: shift_regions((6,), (3, 3), (1, 1)), "grid has 1 axes, window 2"),
        (lambda: shift_regions((6, 6), (3, 3), (1, 3)), r"shift=\[1, 3\]"),
        (lambda: regions_from_mask(torch.zeros(2, 3, 4)), r"\[2, 3, 4\], expected"),
    ],
)
def test_errors_say_what_was_given(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_many_axes_have_more_regions_than_a_byte_has_numbers():
    regions = shift_regions((4,) * 6, (2,) * 6, (1,) * 6)
    assert len(regions.unique()) == 3**6


@pytest.mark.parametrize("window", [7, None, (7.0,), torch.tensor([7, 7]), "7"], ids=str)
def test_a_window_is_whole_numbers(window):
    for call in (lambda: rel_offsets(window), lambda: shift_regions((14,), window, (3,))):
        with pytest.raises(ShapeError, match=r"window is .*, expected an integer for each axis"):
            call()


def test_a_mask_is_a_tensor_of_floats():
    with pytest.raises(DTypeError, match="mask is of type list"):
        regions_from_mask([[0.0]])
    with pytest.raises(DTypeError, match=r"mask is torch.bool, expected floats"):
        regions_from_mask(torch.ones(1, 2, 2, dtype=torch.bool))


def test_offsets_of_a_clamped_window_allocate_only_its_tokens():
    """It once allocated all tokens of a window much longer than its map."""
    offsets = rel_offsets((2**26, 4), num_tokens=3)
    assert offsets.tolist() == [0, 1, 2]
    assert rel_offsets((3, 5), num_tokens=7).equal(rel_offsets((3, 5))[:7])


@pytest.mark.parametrize("window", [(10**6,) * 4, (2**30, 2), (40_000, 40_000)])
def test_a_window_whose_table_is_too_large_is_refused(window):
    with pytest.raises(ShapeError, match=r"window=\[.* needs a table of .* rows, expected at most"):
        rel_offsets(window, num_tokens=1)


def test_regions_of_no_tokens_and_of_meta_tensors_are_refused():
    with pytest.raises(
        ShapeError, match=r"mask has shape \[4, 0, 0\], expected at least one token"
    ):
        regions_from_mask(torch.zeros(4, 0, 0))
    with pytest.raises(UnsupportedError, match="mask is on meta and has no values"):
        regions_from_mask(torch.zeros(4, 9, 9, device="meta"))
