"""Joining blocks that were trained apart."""

import pytest
import torch

from raptor_hf import RaptorModel
from raptor_hf.assembly import assemble_blocks, trained_blocks


@pytest.fixture
def parts(make_model, tmp_path):
    """Two Raptors of two blocks that share everything but the blocks."""
    first, second = make_model(), make_model()
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        for parameter in second.blocks.parameters():
            parameter.add_(1.0)
    for name, model in (("a", first), ("b", second)):
        model.save_pretrained(tmp_path / name)
    return tmp_path / "a", tmp_path / "b", first, second


def test_each_block_comes_from_its_own_part(parts):
    a, b, first, second = parts
    joined = assemble_blocks([(a, [1]), (b, [0])])
    for name, value in joined.state_dict().items():
        expected = second if name.startswith("blocks.0.") else first
        assert torch.equal(value, expected.state_dict()[name]), name
    assert torch.equal(assemble_blocks([(b, [0, 1])]).blocks[1].mlp.fc1.weight, second.blocks[1].mlp.fc1.weight)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (([0], []), "block 1 of 2 is in none of the runs"),
        (([], []), "block 0, 1 of 2 is in none"),
        (([0, 1], [2]), r"block 2 of .*b: these Raptors have the blocks 0 to 1"),
        (([0, 1], [1]), r"block 1 was trained in .*a and in .*b"),
    ],
)
def test_missing_and_doubled_blocks_are_named(blocks, message, parts):
    with pytest.raises(ValueError, match=message):
        assemble_blocks(list(zip(parts[:2], blocks, strict=True)))


def test_parts_of_different_teachers_or_phases_are_refused(parts, make_model, tmp_path):
    a, b, _, second = parts
    make_model(block_schedule=[0, 1, 1]).save_pretrained(tmp_path / "c")
    with pytest.raises(ValueError, match=r"has block_schedule=\[0, 0, 1\] and .*c has block_schedule=\[0, 1, 1\]"):
        assemble_blocks([(a, [0]), (tmp_path / "c", [1])])
    with torch.no_grad():
        second.embeddings.cls_token.add_(1.0)
    second.save_pretrained(b)
    with pytest.raises(ValueError, match=r"embeddings\.cls_token of .*b differs from that of .*a"):
        assemble_blocks([(a, [0]), (b, [1])])


def test_folders_that_are_no_parts_are_named(tmp_path):
    with pytest.raises(ValueError, match="no runs to assemble"):
        assemble_blocks([])
    with pytest.raises(ValueError, match="is no folder of a saved Raptor"):
        assemble_blocks([(tmp_path, [0])])
    with pytest.raises(ValueError, match="holds no finished run"):
        trained_blocks(tmp_path)


def test_dtypes_are_kept(make_model, tmp_path):
    make_model().bfloat16().save_pretrained(tmp_path / "half")
    assert assemble_blocks([(tmp_path / "half", [0, 1])]).dtype is torch.bfloat16
    assert RaptorModel.from_pretrained(tmp_path / "half").dtype is torch.bfloat16
