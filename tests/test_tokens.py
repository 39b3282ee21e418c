"""Positions of the token groups, the patch grid, and how layers and states are counted."""

import pytest
import torch

from raptor_hf.tokens import TOKEN_GROUPS, Segment, TokenLayout, patch_grid, schedule_segments


@pytest.mark.parametrize("num_registers", [0, 1, 2, 4])
def test_groups_cover_the_sequence_once_in_order(num_registers):
    layout = TokenLayout(num_registers)
    tokens = torch.arange(1 + num_registers + 6).view(1, -1, 1)
    parts = [layout.select(tokens, group) for group in layout.groups]
    assert [part.shape[1] for part in parts] == ([1, num_registers, 6] if num_registers else [1, 6])
    assert torch.equal(torch.cat(parts, dim=1), tokens)
    assert torch.equal(layout.select(tokens, "all"), tokens)
    assert layout.num_prefix_tokens == 1 + num_registers
    assert set(layout.groups) == set(TOKEN_GROUPS) - ({"registers"} if num_registers == 0 else set())


def test_spans_as_numbers():
    layout = TokenLayout(4)
    assert layout.span("cls") == slice(0, 1)
    assert layout.span("registers") == slice(1, 5)
    assert layout.span("patch") == slice(5, None)


def test_select_is_a_view_with_any_leading_dimensions():
    states = torch.zeros(3, 2, 9, 8)
    TokenLayout(4).select(states, "patch").fill_(1.0)
    assert states.sum() == 3 * 2 * 4 * 8
    assert states[..., :5, :].sum() == 0


@pytest.mark.parametrize("num_registers", [0, 2, 4])
def test_pool_is_cls_and_mean_patch_without_registers(num_registers):
    states = torch.randn(2, 1 + num_registers + 4, 8)
    states[:, 1 : 1 + num_registers] = 1e6
    pooled = TokenLayout(num_registers).pool(states)
    expected = torch.cat([states[:, 0], states[:, -4:].mean(1)], dim=-1)
    assert pooled.shape == (2, 16)
    torch.testing.assert_close(pooled, expected)
    torch.testing.assert_close(TokenLayout(num_registers).pool(states[0]), expected[0])  # no batch dimension


@pytest.mark.parametrize("num_registers", [0, 1, 2])
def test_layout_without_cls(num_registers):
    layout = TokenLayout(num_registers, has_cls_token=False)
    tokens = torch.arange(num_registers + 6, dtype=torch.float32).view(1, -1, 1)
    assert layout.groups == (("registers", "patch") if num_registers else ("patch",))
    assert torch.equal(torch.cat([layout.select(tokens, group) for group in layout.groups], dim=1), tokens)
    assert torch.equal(layout.pool(tokens), tokens[:, num_registers:].mean(1))  # mean patch alone
    with pytest.raises(ValueError, match=r"tokens='cls' asked of a model without a cls token; use .*'patch' or 'all'"):
        layout.select(tokens, "cls")


def test_layout_errors():
    with pytest.raises(ValueError, match=r"num_register_tokens=-1 is negative; use 0"):
        TokenLayout(-1)
    with pytest.raises(ValueError, match=r"tokens='patches' is not a token group; use one of 'all', 'cls'"):
        TokenLayout(4).span("patches")
    with pytest.raises(ValueError, match=r"'registers' asked of a model without register tokens; use 'cls'"):
        TokenLayout(0).select(torch.zeros(1, 5, 8), "registers")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ([0, 0, 1], [(0, 0, 2), (1, 2, 3)]),
        ([0], [(0, 0, 1)]),
        ([0, 1, 0, 0], [(0, 0, 1), (1, 1, 2), (0, 2, 4)]),
        ([0] * 7 + [1] * 3 + [2] * 2, [(0, 0, 7), (1, 7, 10), (2, 10, 12)]),
    ],
)
def test_segments_chain_the_states(schedule, expected):
    segments = schedule_segments(schedule)
    assert segments == [Segment(*entry) for entry in expected]
    assert segments[0].start_layer == 0
    assert segments[-1].end_layer == len(schedule)
    assert [entry.block for entry in segments for _ in range(entry.num_layers)] == schedule


def test_patch_grid():
    assert patch_grid(84, 56, 14) == (6, 4)
    assert patch_grid(14, 14, 14) == (1, 1)


@pytest.mark.parametrize(
    ("height", "width", "nearest"),
    [(60, 75, "56 x 70"), (13, 13, "14 x 14"), (56, 57, "56 x 56"), (0, 14, "14 x 14"), (3, 100, "14 x 98")],
)
def test_patch_grid_errors_name_the_nearest_size(height, width, nearest):
    with pytest.raises(
        ValueError, match=f"image of {height} x {width} pixels.*patch size 14.*for example to {nearest}"
    ):
        patch_grid(height, width, 14)
