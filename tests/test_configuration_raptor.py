"""The configuration: defaults, round trips, and an error for everything that does not fit."""

import json
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from raptor_hf import RaptorConfig, RaptorModel
from raptor_hf.configuration_raptor import repeats_to_schedule
from raptor_hf.tokens import Segment, TokenLayout


def test_defaults_are_dinov2_base_with_registers():
    config = RaptorConfig()
    expected = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "mlp_type": "gelu",
        "layer_norm_eps": 1e-6,
        "image_size": 518,
        "patch_size": 14,
        "num_channels": 3,
        "num_register_tokens": 4,
        "block_schedule": [0] * 7 + [1] * 3 + [2] * 2,
        "depth_scale": True,
        "depth_scale_init": "zeros",
        "layerscale_value": 1.0,
        "interpolate_antialias": True,
        "initializer_range": 0.02,
        "teacher_name_or_path": None,
        "teacher_revision": None,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.model_type == "raptor"
    assert config.num_blocks == 3
    assert config.segments == [Segment(0, 0, 7), Segment(1, 7, 10), Segment(2, 10, 12)]
    assert config.token_layout == TokenLayout(4)


def test_json_round_trip(make_config, tmp_path):
    config = make_config(
        block_schedule=(0, 1, 0, 2),
        mlp_type="swiglu",
        intermediate_size="dinov2",
        num_register_tokens=0,
        depth_scale=False,
        depth_scale_init="normal",
        layerscale_value=1e-5,
        layer_norm_eps=1e-5,
        interpolate_antialias=False,
        teacher_name_or_path="org/teacher",
        teacher_revision="main",
        num_labels=5,
    )
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["block_schedule"] == [0, 1, 0, 2]
    assert stored["intermediate_size"] == 88
    for loaded in (RaptorConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is RaptorConfig
        ignored = ("transformers_version", "_name_or_path")
        ours, theirs = config.to_dict(), loaded.to_dict()
        assert {k: v for k, v in ours.items() if k not in ignored} == {
            k: v for k, v in theirs.items() if k not in ignored
        }


def test_from_repeats_and_segments():
    config = RaptorConfig.from_repeats((4, 3, 3, 2), hidden_size=384, num_attention_heads=6)
    assert config.block_schedule == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 2
    assert (config.num_hidden_layers, config.num_blocks, config.intermediate_size) == (12, 4, 1536)
    assert [segment.num_layers for segment in config.segments] == [4, 3, 3, 2]
    assert repeats_to_schedule([2, 1]) == [0, 0, 1]


def test_schedule_need_not_be_contiguous(make_config):
    config = make_config(block_schedule=[0, 1, 0, 0])
    assert config.num_blocks == 2
    assert config.segments == [Segment(0, 0, 1), Segment(1, 1, 2), Segment(0, 2, 4)]


@pytest.mark.parametrize(
    ("width", "hidden_size", "number"),
    [
        (None, 768, 3072),
        ("research", 768, 3072),
        ("dinov2", 768, 2048),
        ("dinov2", 1536, 4096),  # DINOv2-g
        ("dinov2", 32, 88),  # 85.3 rounded up to a multiple of 8
        (100, 32, 100),
    ],
)
def test_widths(width, hidden_size, number, make_config):
    assert make_config(hidden_size=hidden_size, intermediate_size=width).intermediate_size == number


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "hidden_size=0 must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"intermediate_size": 0}, "intermediate_size=0 must be at least 1"),
        ({"patch_size": 0}, "patch_size=0 must be at least 1"),
        ({"image_size": 0}, "image_size=0 must be at least 1"),
        ({"num_channels": 0}, "num_channels=0 must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"num_register_tokens": -1}, "num_register_tokens=-1 must be 0 or more; use 0 for none"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0 must be positive; DINOv2 uses 1e-6"),
        ({"hidden_size": 33}, "hidden_size=33 is no multiple of num_attention_heads=2; choose a number of heads"),
        ({"image_size": 60}, "image_size=60 is no multiple of patch_size=14; the nearest is 56"),
        ({"image_size": 13}, "image_size=13 is no multiple of patch_size=14; the nearest is 14"),
        ({"mlp_type": "relu"}, "mlp_type='relu' is unknown; use one of gelu, swiglu"),
        ({"depth_scale_init": "ones"}, "depth_scale_init='ones' is unknown; use one of zeros, normal"),
        ({"intermediate_size": "wide"}, r"intermediate_size='wide' is no width; give a number, 'research'"),
        ({"block_schedule": None}, r"block_schedule is missing and has no default for num_hidden_layers=3; use Raptor"),
        ({"block_schedule": [0, 1]}, "block_schedule has 2 entries for num_hidden_layers=3; it needs one block number"),
        ({"block_schedule": []}, "block_schedule has 0 entries for num_hidden_layers=3"),
        ({"block_schedule": [0, -1, 0]}, r"block_schedule=\[0, -1, 0\]: blocks are numbered from 0, -1 is negative"),
        ({"block_schedule": [0, 0, 3]}, r"block_schedule=\[0, 0, 3\] names 4 blocks for 3 layers; use at most one"),
        ({"block_schedule": [0, 2, 2]}, r"block_schedule=\[0, 2, 2\] never uses block 1; number the blocks 0..k-1"),
        ({"block_schedule": [1, 1, 1]}, "never uses block 0"),
    ],
)
def test_errors(fields, message, make_config, tmp_path):
    """The same sentence at construction, from overrides of a saved model, and when saved after `setattr`."""
    with pytest.raises(ValueError, match=message):
        make_config(**{"num_hidden_layers": 3, **fields})

    config = make_config()
    if "wide" in fields.values():  # a name is resolved by the constructor alone
        message = "intermediate_size='wide' set after construction; give the number"
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        RaptorModel(RaptorConfig.from_pretrained(tmp_path, **fields))
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        config.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_size": "32"}, "expected int, got str"),
        ({"block_schedule": "001"}, "block_schedule"),
        ({"block_schedule": [0.0, 0.0, 1.0]}, "block_schedule"),
        ({"depth_scale": "no"}, "expected bool, got str"),
    ],
)
def test_types_are_checked(fields, expected, make_config):
    with pytest.raises(StrictDataclassError, match=expected):
        make_config(**{"num_hidden_layers": 3, **fields})


@pytest.mark.parametrize("name", ["research", "dinov2", None])
def test_width_by_name_after_construction(name, make_config):
    config = make_config()
    config.intermediate_size = name
    with pytest.raises(ValueError, match=rf"intermediate_size={name!r} set after construction; give the number"):
        RaptorModel(config)


@pytest.mark.parametrize("repeats", [(), (2, 0, 1), (3, -1)])
def test_repeats_are_positive(repeats):
    with pytest.raises(ValueError, match=r"repeats=.*every block is applied at least once; give positive counts"):
        RaptorConfig.from_repeats(repeats)


def test_repeats_and_layers_disagree():
    with pytest.raises(ValueError, match="block_schedule has 12 entries for num_hidden_layers=11"):
        RaptorConfig.from_repeats((7, 3, 2), num_hidden_layers=11)


FIELDS = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 88,
    "mlp_type": "swiglu",
    "image_size": 56,
    "num_register_tokens": 1,
    "teacher_name_or_path": "org/teacher",
}


class FakeTeacher:
    def config_fields(self):
        return dict(FIELDS)


@pytest.mark.parametrize("phases", [(2, 1), SimpleNamespace(block_schedule=(0, 0, 1))])
def test_from_teacher_copies_fields(phases):
    config = RaptorConfig.from_teacher(FakeTeacher(), phases, depth_scale=False, layer_norm_eps=None)
    assert {name: getattr(config, name) for name in FIELDS} == FIELDS
    assert config.block_schedule == [0, 0, 1]
    assert config.depth_scale is False
    assert config.layer_norm_eps == 1e-6  # None keeps the teacher's value, here the default


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, ("swiglu", 88)),
        ({"mlp_type": "swiglu"}, ("swiglu", 88)),
        ({"mlp_type": "gelu"}, ("gelu", 128)),  # another MLP does not keep the teacher's width
        ({"mlp_type": "gelu", "intermediate_size": 64}, ("gelu", 64)),
        ({"intermediate_size": "research"}, ("swiglu", 128)),
    ],
)
def test_from_teacher_and_the_mlp(overrides, expected):
    config = RaptorConfig.from_teacher(FakeTeacher(), (2, 1), **overrides)
    assert (config.mlp_type, config.intermediate_size) == expected


@pytest.mark.parametrize("phases", [(7, 3, 2), (1, 1), SimpleNamespace(block_schedule=[0])])
def test_from_teacher_wrong_number_of_layers(phases):
    with pytest.raises(ValueError, match=r"phases of \d+ layers for a teacher of 3: find them on this teacher"):
        RaptorConfig.from_teacher(FakeTeacher(), phases)
