"""States and layouts of every family of ViTs, against the library's own hidden states; what is no plain ViT."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification, BertConfig, Siglip2VisionConfig

from raptor_hf.similarity import layer_similarities
from raptor_hf.vision_models import VisionModel
from vit_families import FAMILIES, SIZES, TEXT, make_config, make_model


@pytest.mark.parametrize("size", [32, 48])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_librarys_own(family, size):
    model = VisionModel(make_model(family))
    pixel_values = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    states = model.hidden_states(pixel_values)
    with torch.no_grad():
        own = model.model(pixel_values, output_hidden_states=True, **model.forward_kwargs(pixel_values)).hidden_states
    assert len(states) == model.num_layers + 1 == 4
    for state, expected in zip(states, own, strict=True):
        assert torch.equal(state, expected)
    assert model.layout.groups == FAMILIES[family][1]
    assert states[0].shape == (2, model.layout.num_prefix_tokens + (size // 8) ** 2, 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_that_a_family_lacks_are_absent(family):
    model = VisionModel(make_model(family))
    similarities = layer_similarities(model.iter_hidden_states([{"pixel_values": torch.randn(3, 32, 32)}] * 3, 2))
    assert tuple(similarities) == ("all", *FAMILIES[family][1])
    assert all(0 < abs(matrix[0, 2]) < 1 for matrix in similarities.values())


@pytest.mark.parametrize(("family", "cls_tokens"), [("clip", 1), ("siglip", 0)])
def test_a_model_of_images_and_texts_gives_its_vision_tower(family, cls_tokens, tmp_path):
    whole = make_model(family)
    whole.save_pretrained(tmp_path)
    model, pixel_values = VisionModel.from_pretrained(tmp_path), torch.randn(1, 3, 32, 32)
    assert model.num_layers == 3
    assert model.layout.num_prefix_tokens == cls_tokens
    for state, expected in zip(
        model.hidden_states(pixel_values), VisionModel(whole).hidden_states(pixel_values), strict=True
    ):
        assert torch.equal(state, expected)


@pytest.mark.parametrize("family", ["vit", "beit", "clip"])
def test_a_head_is_left_out(family, tmp_path):
    config = make_config(family)
    classifier = AutoModelForImageClassification.from_config(config).eval()
    classifier.save_pretrained(tmp_path)
    pixel_values = torch.randn(1, 3, 32, 32)
    ours, loaded = VisionModel(classifier), VisionModel.from_pretrained(tmp_path)
    for state, expected in zip(ours.hidden_states(pixel_values), loaded.hidden_states(pixel_values), strict=True):
        assert torch.equal(state, expected)


def test_masked_autoencoders_see_every_patch_in_order():
    model, pixel_values = VisionModel(make_model("vit_mae")), torch.randn(2, 3, 32, 32)
    embeddings = model.model.embeddings
    with torch.no_grad():
        expected = embeddings.patch_embeddings(pixel_values) + embeddings.position_embeddings[:, 1:]
    assert torch.equal(model.hidden_states(pixel_values)[0][:, 1:], expected)
    assert torch.equal(model.hidden_states(pixel_values)[3], model.hidden_states(pixel_values)[3])  # nothing is drawn


def test_states_are_in_evaluation_mode_without_gradients_or_hooks():
    model, pixel_values = VisionModel(make_model("clip_vision_model")), torch.randn(1, 3, 32, 32)
    model.model.train()
    assert not any(state.requires_grad for state in model.hidden_states(pixel_values.requires_grad_()))
    assert not model.model.training
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BertConfig(**TEXT), "type 'bert' takes no pixel_values"),
        (
            Siglip2VisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_patches=16),
            "'siglip2_vision_model' needs pixel_attention_mask, spatial_shapes; only ViTs that take nothing but",
        ),
        (
            AutoConfig.for_model("swin", image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[1, 1]),
            "'swin' is no list of layers that all keep one sequence of tokens; only plain ViTs can be measured",
        ),
    ],
)
def test_other_models_are_refused_when_they_are_loaded(config, message, tmp_path):
    model = AutoModel.from_config(config)
    with pytest.raises(ValueError, match=message):
        VisionModel(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        VisionModel.from_pretrained(tmp_path)


def test_further_tokens_are_refused():
    fields = {**SIZES, "image_size": [32, 32], "num_detection_tokens": 5, "intermediate_size": 32}
    model = VisionModel(AutoModel.from_config(AutoConfig.for_model("yolos", **fields)))
    with pytest.raises(ValueError, match=r"'yolos' has states of shapes \[\(1, 22, 16\)\], while cls and patch tokens"):
        model.hidden_states(torch.zeros(1, 3, 32, 32))
