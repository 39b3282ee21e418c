"""The teacher's view of a ViT: with its own weights in one block per layer, a Raptor is that ViT."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    BertConfig,
    BertModel,
    BitImageProcessor,
    DeiTForImageClassification,
    Dinov2ForImageClassification,
    Dinov2WithRegistersForImageClassification,
    ViTForImageClassification,
    ViTMAEForPreTraining,
)

from raptor_hf import RaptorModel
from raptor_hf.data import dinov2_processor
from raptor_hf.teachers import FAMILIES, Teacher

TEACHERS = {
    "registers": ("dinov2_with_registers", {}),
    "no_registers": ("dinov2_with_registers", {"num_register_tokens": 0}),
    "swiglu": ("dinov2_with_registers", {"use_swiglu_ffn": True}),
    "dinov2": ("dinov2", {}),
    "vit": ("vit", {}),
    "vit_no_bias": ("vit", {"qkv_bias": False}),
    "deit": ("deit", {}),
    "vit_mae": ("vit_mae", {}),
}
CLASSIFIERS = {
    "dinov2_with_registers": Dinov2WithRegistersForImageClassification,
    "dinov2": Dinov2ForImageClassification,
    "vit": ViTForImageClassification,
    "deit": DeiTForImageClassification,
    "vit_mae": ViTMAEForPreTraining,
}
SIZES = {"native": (56, 56), "larger": (84, 84), "oblong": (42, 70), "as_many_patches": (28, 112)}


@pytest.fixture(params=TEACHERS)
def teacher(request, make_teacher):
    family, overrides = TEACHERS[request.param]
    return make_teacher(family, layer_norm_eps=1e-2, **overrides)  # an eps that is not copied shows


def images(size, batch_size=2):
    return torch.randn(batch_size, 3, *size)


def assert_is_the_teacher(student, teacher, pixel_values, tolerance=1e-5):
    """Every state and the final norm agree, relative to the largest entry of the state."""
    with torch.no_grad():
        outputs = student.eval()(pixel_values, output_hidden_states=True)
    states = teacher.hidden_states(pixel_values)
    assert len(outputs.hidden_states) == len(states) == teacher.num_layers + 1
    pairs = [
        *zip(outputs.hidden_states, states, strict=True),
        (outputs.last_hidden_state, teacher.final_norm(states[-1])),
    ]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    for before, after in pairwise(states):  # a ViT that passes its input on would prove nothing
        assert (after - before).norm() > 0.03 * before.norm()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_block_per_layer_is_the_teacher(teacher, attention):
    student = RaptorModel.from_teacher(teacher, (1, 1, 1))
    for model in (student, teacher.model):
        model.set_attn_implementation(attention)
    for size in SIZES.values():
        assert_is_the_teacher(student, teacher, images(size))


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_embeddings_are_the_teachers_bit_for_bit(teacher, size):
    student = RaptorModel.from_teacher(teacher, (1, 1, 1))
    pixel_values = images(size)
    with torch.no_grad():
        assert torch.equal(student.embeddings(pixel_values), teacher.hidden_states(pixel_values)[0])


def test_registers_alone_interpolate_with_antialiasing(make_teacher):
    """The switch matters: with the other value the embeddings of a smaller image are others."""
    for family, spec in FAMILIES.items():
        student = RaptorModel.from_teacher(make_teacher(family), (1, 1, 1))
        assert student.config.interpolate_antialias is spec.antialias is (family == "dinov2_with_registers")
    with torch.no_grad():
        smaller, native = images((28, 28)), images((56, 56))
        own = [student.embeddings(smaller), student.embeddings(native)]
        student.embeddings.antialias = not student.embeddings.antialias
        other = [student.embeddings(smaller), student.embeddings(native)]
    assert (own[0] - other[0]).abs().max() > 1e-2
    assert torch.equal(own[1], other[1])


def test_saved_and_loaded_from_a_folder(teacher, tmp_path):
    teacher.model.save_pretrained(tmp_path)
    processor = BitImageProcessor(size={"shortest_edge": 63}, crop_size={"height": 56, "width": 56})
    processor.save_pretrained(tmp_path)
    loaded = Teacher.from_pretrained(tmp_path)
    pixel_values = images((42, 70))
    for ours, theirs in zip(loaded.hidden_states(pixel_values), teacher.hidden_states(pixel_values), strict=True):
        assert torch.equal(ours, theirs)
    assert_is_the_teacher(RaptorModel.from_teacher(loaded, (1, 1, 1)), teacher, pixel_values)
    assert not any("pooler" in name for name in loaded.model.state_dict())  # no random layer that nobody trained
    assert loaded.layout == teacher.layout
    assert loaded.name_or_path == str(tmp_path)
    assert loaded.revision is None
    assert loaded.image_processor.size["shortest_edge"] == 63


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_without_preprocessor_config(family, make_teacher, tmp_path):
    """DINOv2's checkpoints without one get DINOv2's values; no values are invented for the others."""
    make_teacher(family).model.save_pretrained(tmp_path)
    processor = Teacher.from_pretrained(tmp_path).image_processor
    if family.startswith("dinov2"):
        assert processor.to_dict() == dinov2_processor().to_dict()
        assert list(processor.image_mean) == [0.485, 0.456, 0.406]
        assert list(processor.image_std) == [0.229, 0.224, 0.225]
    else:
        assert processor is None


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_with_a_head_gives_its_backbone(family, make_teacher, tmp_path):
    teacher = make_teacher(family)
    classifier = CLASSIFIERS[family](teacher.model.config).eval()
    classifier.base_model.load_state_dict(teacher.model.state_dict())
    classifier.save_pretrained(tmp_path)
    pixel_values = images((56, 56))
    for loaded in (Teacher.from_pretrained(tmp_path), Teacher(classifier)):
        assert type(loaded.model) is type(teacher.model)
        student = RaptorModel.from_teacher(loaded, (1, 1, 1))
        assert_is_the_teacher(student, teacher, pixel_values)


@pytest.mark.parametrize("family", FAMILIES)
def test_float64(family, make_teacher, tmp_path):
    make_teacher(family).model.save_pretrained(tmp_path)
    teacher = Teacher.from_pretrained(tmp_path, dtype=torch.float64)
    student = RaptorModel.from_teacher(teacher, (1, 1, 1), dtype=torch.float64)
    assert student.dtype == student.config.dtype == torch.float64
    assert_is_the_teacher(student, teacher, images((56, 56)).double(), tolerance=1e-13)
    if not family.startswith("dinov2"):  # which interpolate in float32 whatever the model
        assert_is_the_teacher(student, teacher, images((42, 70)).double(), tolerance=1e-13)


def test_student_is_float32_unless_asked(make_teacher):
    teacher = make_teacher()
    teacher.model.bfloat16()
    student = RaptorModel.from_teacher(teacher, (2, 1))
    assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}


COMMON = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "layer_norm_eps": 3e-5,
    "image_size": 48,
    "patch_size": 8,
    "num_channels": 1,
    "initializer_range": 0.03,
}


@pytest.mark.parametrize(
    ("name", "extra", "expected"),
    [
        ("registers", {"num_register_tokens": 2}, {"num_register_tokens": 2, "interpolate_antialias": True}),
        ("no_registers", {}, {"num_register_tokens": 0, "interpolate_antialias": True}),
        ("swiglu", {}, {"mlp_type": "swiglu", "intermediate_size": 128, "interpolate_antialias": True}),
        ("dinov2", {"mlp_ratio": 2}, {"num_register_tokens": 0, "intermediate_size": 96}),
        ("vit", {"intermediate_size": 40}, {"num_register_tokens": 0, "intermediate_size": 40}),
        ("deit", {"intermediate_size": 192}, {"num_register_tokens": 1, "intermediate_size": 192}),
        ("vit", {"intermediate_size": 192, "image_size": [48, 48], "patch_size": (8, 8)}, {"num_register_tokens": 0}),
    ],
)
def test_config_is_the_teachers_field_by_field(name, extra, expected, make_teacher):
    family, overrides = TEACHERS[name]
    teacher = make_teacher(family, **{**COMMON, **overrides, **extra})
    teacher.revision = "abc"
    config = RaptorModel.from_teacher(teacher, (2, 1)).config
    derived = {"mlp_type": "gelu", "intermediate_size": 192, "num_register_tokens": 4, "interpolate_antialias": False}
    origin = {"teacher_name_or_path": family, "teacher_revision": "abc", "block_schedule": [0, 0, 1]}
    for field, value in {**COMMON, **derived, **origin, **expected}.items():
        assert getattr(config, field) == value, field


@pytest.mark.parametrize("attention_bias", [True, False])
def test_block_state_by_hand(attention_bias, make_teacher):
    teacher = make_teacher("vit", qkv_bias=attention_bias)
    state, layer = teacher.block_state(2), teacher.model.layers[1]
    parts = (layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj)
    assert torch.equal(state["attention.qkv.weight"], torch.cat([part.weight for part in parts]))
    bias = torch.cat([part.bias for part in parts]) if attention_bias else torch.zeros(96)
    assert torch.equal(state["attention.qkv.bias"], bias)
    assert torch.equal(state["attention.proj.weight"], layer.attention.o_proj.weight)
    assert torch.equal(state["norm1.weight"], layer.layernorm_before.weight)
    assert torch.equal(state["norm2.bias"], layer.layernorm_after.bias)
    assert torch.equal(state["layer_scale1.scale"], torch.ones(32))  # a ViT has none
    assert not any(value.requires_grad for value in state.values())
    assert len(state) == 14


def test_swiglu_rows_are_gate_then_up(make_teacher):
    teacher = make_teacher(use_swiglu_ffn=True)
    state, mlp = teacher.block_state(3), teacher.model.encoder.layer[2].mlp
    assert torch.equal(state["mlp.fc1.weight"], torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    assert torch.equal(state["mlp.fc1.bias"], torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias]))
    assert torch.equal(state["mlp.fc2.weight"], mlp.down_proj.weight)


@pytest.mark.parametrize("layer", [0, 4, -1])
def test_layers_are_counted_from_one(layer, make_teacher):
    with pytest.raises(ValueError, match=rf"layer={layer}: this teacher has layers 1 to 3"):
        make_teacher().block_state(layer)


@pytest.mark.parametrize("family", FAMILIES)
def test_unmapped_weight_is_reported(family, make_teacher):
    teacher = make_teacher(family)
    layer = teacher.layers[0]
    layer.attention.q_norm = torch.nn.LayerNorm(16)
    with pytest.raises(ValueError, match=r"cannot hold: attention\.q_norm\.weight, attention\.q_norm\.bias"):
        RaptorModel.from_teacher(teacher, (1, 2))


def test_unsupported_architecture(tmp_path):
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=9)
    with pytest.raises(
        ValueError, match=r"'bert' is not supported; use a checkpoint of one of dinov2_with_registers, "
    ):
        Teacher(BertModel(config))
    config.save_pretrained(tmp_path)  # no weights: the architecture is refused before they are looked for
    with pytest.raises(ValueError, match="'bert' is not supported"):
        Teacher.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act='gelu_new': a Raptor block has the exact GELU or SwiGLU"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"image_size": [56, 70]}, r"image_size=\[56, 70\]: only square ones"),
        ({"patch_size": [14, 7]}, r"patch_size=\[14, 7\]: only square ones"),
    ],
)
def test_teacher_that_a_block_cannot_be(fields, message, make_teacher, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_teacher("vit", **fields)
    config = make_teacher("vit").model.config
    for name, value in fields.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        Teacher.from_pretrained(tmp_path)


def test_missing_checkpoint(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        Teacher.from_pretrained(tmp_path / "nowhere")


def test_teacher_is_frozen_and_stays_in_evaluation_mode(make_teacher, pixels):
    teacher = make_teacher("vit", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    first = teacher.hidden_states(pixels)
    teacher.model.train()
    second = teacher.hidden_states(pixels.requires_grad_())
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before, after)
        assert not after.requires_grad
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    assert not teacher.final_norm(first[-1]).requires_grad


def test_final_norm_is_applied_once(teacher, pixels):
    states = teacher.hidden_states(pixels)
    with torch.no_grad():
        last = teacher.model(pixels, **teacher.forward_kwargs(pixels)).last_hidden_state
    assert torch.equal(teacher.final_norm(states[-1]), last)
    assert torch.equal(teacher.last_hidden_state(pixels), last)
    assert not torch.allclose(states[-1], last, atol=0.1)


def test_distillation_token_counts_as_a_register(make_teacher):
    assert make_teacher("deit").layout.groups == ("cls", "registers", "patch")
    assert make_teacher("deit").layout.num_register_tokens == 1
    assert make_teacher("vit").layout.num_register_tokens == 0


def pil_images(count):
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 255, (60, 70, 3), dtype=np.uint8)) for _ in range(count)]


def test_states_of_many_images(make_teacher):
    processor = BitImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    teacher = make_teacher(image_processor=processor)
    pictures = pil_images(5)
    pixel_values = processor(pictures, return_tensors="pt")["pixel_values"]
    expected = teacher.hidden_states(pixel_values)
    for items in (
        pictures,
        [{"image": picture, "label": 0} for picture in pictures],
        [{"pixel_values": pixels} for pixels in pixel_values],
    ):
        batches = teacher.iter_hidden_states(items, batch_size=2)
        assert batches.layout == teacher.layout
        for _ in range(2):  # as often as the images can be iterated
            states = list(batches)
            assert [batch[0].shape[0] for batch in states] == [2, 2, 1]
            for layer, whole in enumerate(expected):
                torch.testing.assert_close(torch.cat([batch[layer] for batch in states]), whole)


def test_iter_hidden_states_errors(make_teacher):
    teacher = make_teacher("vit")
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        teacher.iter_hidden_states([], batch_size=0)
    with pytest.raises(ValueError, match=r"model 'vit' has no image processor; give processed images"):
        next(iter(teacher.iter_hidden_states(pil_images(1))))
    assert list(teacher.iter_hidden_states([])) == []


def test_processor_of_the_folder_is_kept(make_teacher, tmp_path):
    """A DINOv2 folder with its own values keeps them."""
    make_teacher().model.save_pretrained(tmp_path)
    BitImageProcessor(image_mean=[0.1, 0.2, 0.3]).save_pretrained(tmp_path)
    processor = Teacher.from_pretrained(tmp_path).image_processor
    assert processor.to_dict() == AutoImageProcessor.from_pretrained(tmp_path).to_dict()
    assert list(processor.image_mean) == [0.1, 0.2, 0.3]
