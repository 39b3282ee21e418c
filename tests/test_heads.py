"""What is built on the base model: the image classifier, the backbone, and how they share checkpoints with it."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoBackbone, AutoConfig, AutoModel, AutoModelForImageClassification

from raptor_hf import RaptorBackbone, RaptorForImageClassification, RaptorModel
from raptor_hf.distillation import RaptorForDistillation


@pytest.fixture
def classifier(make_model):
    return make_model(RaptorForImageClassification, num_labels=5)


def test_logits_are_linear_in_cls_and_mean_patch(classifier, pixels):
    with torch.no_grad():
        last = classifier.raptor(pixels).last_hidden_state
        features = torch.cat([last[:, 0], last[:, 5:].mean(1)], dim=1)
        expected = F.linear(features, classifier.classifier.weight, classifier.classifier.bias)
        outputs = classifier(pixels)
    torch.testing.assert_close(outputs.logits, expected)
    assert outputs.logits.shape == (2, 5)
    assert outputs.loss is None
    assert outputs.hidden_states is None
    assert outputs.attentions is None


@pytest.mark.parametrize("num_registers", [0, 2, 4])
def test_registers_do_not_reach_the_logits(num_registers, make_model, pixels):
    """Registers of the normed last state set to 1e6, then one patch: only the patch may show."""
    model = make_model(RaptorForImageClassification, num_labels=3, num_register_tokens=num_registers)
    span = slice(0, 0)

    def flood(module, inputs, output):
        output = output.clone()
        output[:, span] = 1e6
        return output

    model.raptor.layernorm.register_forward_hook(flood)
    with torch.no_grad():
        plain = model(pixels).logits
        span = slice(1, 1 + num_registers)
        assert torch.equal(model(pixels).logits, plain)
        span = slice(1 + num_registers, 2 + num_registers)
        assert not torch.allclose(model(pixels).logits, plain, atol=1.0)


def test_states_and_attentions_pass_through(classifier, pixels):
    classifier.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = classifier(pixels, output_hidden_states=True, output_attentions=True)
        base = classifier.raptor(pixels, output_hidden_states=True, output_attentions=True)
        early = classifier(hidden_states=base.hidden_states[2], start_layer=2)
    assert len(outputs.hidden_states) == 4
    assert len(outputs.attentions) == 3
    for own, other in zip(
        (*outputs.hidden_states, *outputs.attentions), (*base.hidden_states, *base.attentions), strict=True
    ):
        assert torch.equal(own, other)
    assert torch.equal(early.logits, outputs.logits)


def test_losses(make_model, pixels):
    labels = torch.tensor([2, 0])
    model = make_model(RaptorForImageClassification, num_labels=3)
    outputs = model(pixels, labels=labels)
    torch.testing.assert_close(outputs.loss, F.cross_entropy(outputs.logits, labels))

    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    model = make_model(RaptorForImageClassification, num_labels=3, problem_type="multi_label_classification")
    outputs = model(pixels, labels=several)
    torch.testing.assert_close(outputs.loss, F.binary_cross_entropy_with_logits(outputs.logits, several))

    model = make_model(RaptorForImageClassification, num_labels=1)
    outputs = model(pixels, labels=torch.tensor([0.3, -1.0]))
    torch.testing.assert_close(outputs.loss, F.mse_loss(outputs.logits.squeeze(1), torch.tensor([0.3, -1.0])))


def test_training_lowers_the_loss(make_model, pixels):
    model = make_model(RaptorForImageClassification, jittered=False, num_labels=2).train()
    model.raptor.freeze_embeddings()
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=3e-4)
    frozen = model.raptor.embeddings.cls_token.clone()
    labels = torch.tensor([0, 1])
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(pixels, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
    assert torch.equal(model.raptor.embeddings.cls_token, frozen)


@pytest.mark.parametrize("by_configuration", [False, True])
def test_tuple_output(by_configuration, classifier, pixels):
    labels = torch.tensor([0, 1])
    expected = classifier(pixels, labels=labels, output_hidden_states=True)
    if by_configuration:
        classifier.config.return_dict = False
        outputs = classifier(pixels, labels=labels, output_hidden_states=True)
    else:
        outputs = classifier(pixels, labels=labels, output_hidden_states=True, return_dict=False)
    assert isinstance(outputs, tuple)
    assert torch.equal(outputs[0], expected.loss)
    assert torch.equal(outputs[1], expected.logits)
    assert len(outputs[2]) == 4


def test_parameter_names(classifier, make_model):
    base = [f"raptor.{name}" for name in make_model().state_dict()]
    assert sorted(classifier.state_dict()) == sorted([*base, "classifier.weight", "classifier.bias"])
    assert classifier.base_model is classifier.raptor
    assert list(classifier.named_buffers()) == []


def test_save_and_load(classifier, pixels, tmp_path):
    classifier.config.id2label = {0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}
    classifier.save_pretrained(tmp_path)
    loaded, info = RaptorForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in classifier.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixels).logits, classifier(pixels).logits, rtol=1e-6, atol=1e-6)
    assert loaded.config.id2label[4] == "e"


def test_base_checkpoint_into_the_head(tiny_model, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    loaded, info = RaptorForImageClassification.from_pretrained(tmp_path, num_labels=7, output_loading_info=True)
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert not info["unexpected_keys"]
    for name, value in tiny_model.state_dict().items():
        assert torch.equal(loaded.raptor.state_dict()[name], value), name
    assert loaded.classifier.weight.shape == (7, 64)
    assert 0.015 < loaded.classifier.weight.std() < 0.025
    assert not loaded.classifier.bias.any()


def test_head_checkpoint_into_the_base(classifier, tmp_path):
    classifier.save_pretrained(tmp_path)
    loaded, info = RaptorModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["unexpected_keys"]) == {"classifier.weight", "classifier.bias"}
    assert not info["missing_keys"]
    for name, value in classifier.raptor.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_auto_classes(classifier, tiny_config, tmp_path):
    classifier.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(tiny_config)
    assert type(AutoModel.from_pretrained(tmp_path)) is RaptorModel
    assert type(AutoModelForImageClassification.from_pretrained(tmp_path)) is RaptorForImageClassification
    assert type(AutoModel.from_config(tiny_config)) is RaptorModel
    assert type(AutoModelForImageClassification.from_config(tiny_config)) is RaptorForImageClassification
    assert type(AutoBackbone.from_config(tiny_config)) is RaptorBackbone


@pytest.mark.parametrize("num_registers", [0, 4])
@pytest.mark.parametrize("layernorm", [True, False])
def test_feature_maps_are_the_patches_as_an_image(num_registers, layernorm, make_model):
    """All stages of an image of 2 x 3 patches; one value of the map against one token of the state."""
    model = make_model(
        RaptorBackbone, num_register_tokens=num_registers, apply_layernorm=layernorm, out_indices=[0, 1, 2, 3]
    )
    pixels = torch.randn(2, 3, 28, 42)
    with torch.no_grad():
        outputs = model(pixels)
        states = model.raptor(pixels, output_hidden_states=True).hidden_states
        states = [model.raptor.layernorm(state) if layernorm else state for state in states]
    assert model.out_features == ["stem", "stage1", "stage2", "stage3"]
    assert model.channels == [32] * 4
    assert outputs.hidden_states is None
    assert outputs.attentions is None
    for feature_map, state in zip(outputs.feature_maps, states, strict=True):
        assert feature_map.shape == (2, 32, 2, 3)
        torch.testing.assert_close(feature_map[:, :, 1, 0], state[:, 1 + num_registers + 3])
        torch.testing.assert_close(feature_map[:, :, 0, 2], state[:, 1 + num_registers + 2])


def test_backbone_runs_no_layer_after_the_last_stage(make_model, pixels):
    model = make_model(RaptorBackbone, out_features=["stage1"])
    calls = []
    for block in model.raptor.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(pixels)
        assert len(calls) == 1
        asked = model(pixels, output_hidden_states=True)
        assert len(calls) == 1 + 3
        some = model(pixels, output_hidden_states=[0, -1])
    assert len(asked.hidden_states) == 4
    assert [state is not None for state in some.hidden_states] == [True, False, False, True]
    assert torch.equal(some.hidden_states[3], asked.hidden_states[3])


def test_backbone_states_and_attentions(make_model, pixels):
    model = make_model(RaptorBackbone, reshape_hidden_states=False, out_indices=[-1], apply_layernorm=False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(pixels, output_attentions=True, output_hidden_states=True)
        feature_maps, states, attentions = model(
            pixels, output_attentions=True, output_hidden_states=True, return_dict=False
        )
    assert torch.equal(outputs.feature_maps[0], outputs.hidden_states[3])
    assert torch.equal(feature_maps[0], outputs.feature_maps[0])
    assert (len(states), len(attentions), len(outputs.attentions)) == (4, 3, 3)


def test_stages_follow_the_number_of_layers(make_config, make_model, tmp_path):
    with pytest.raises(ValueError, match=r"out_features must be a subset of stage_names.*stage9"):
        make_config(out_features=["stage9"])
    make_model(RaptorBackbone, out_features=["stage1", "stage3"]).save_pretrained(tmp_path)
    assert RaptorBackbone.from_pretrained(tmp_path).out_indices == [1, 3]
    assert RaptorBackbone.from_pretrained(tmp_path, out_indices=[2]).out_features == ["stage2"]
    shorter = {"num_hidden_layers": 2, "block_schedule": [0, 1]}
    with pytest.raises(ValueError, match="out_features must be a subset of stage_names"):
        RaptorBackbone.from_pretrained(tmp_path, **shorter)
    assert RaptorBackbone.from_pretrained(tmp_path, **shorter, out_indices=[2]).out_features == ["stage2"]
    assert AutoConfig.from_pretrained(tmp_path).stage_names == ["stem", "stage1", "stage2", "stage3"]


def test_a_dense_head_learns_on_the_backbone(make_model):
    """A 1 x 1 convolution on two stages learns to tell dark patches from bright ones, the backbone frozen."""
    model = make_model(RaptorBackbone, out_indices=[1, 3]).requires_grad_(False)
    head = torch.nn.Conv2d(sum(model.channels), 2, 1)
    target = torch.randint(0, 2, (8, 4, 4), generator=torch.Generator().manual_seed(3))
    pixels = (2.0 * target - 1)[:, None].repeat_interleave(14, -2).repeat_interleave(14, -1).expand(-1, 3, -1, -1)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.05)
    features = torch.cat(model(pixels).feature_maps, dim=1)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(head(features), target).backward()
        optimizer.step()
    assert (head(features).argmax(1) == target).float().mean() > 0.95


CLASSES = (RaptorModel, RaptorBackbone, RaptorForImageClassification, RaptorForDistillation)


@pytest.mark.parametrize("target", CLASSES)
@pytest.mark.parametrize("source", CLASSES)
def test_checkpoints_load_into_each_other(source, target, make_model, tmp_path):
    """Base, backbone, head and distillation checkpoints: the head alone is missing or too much, and is reported."""
    saved = make_model(source)
    saved.save_pretrained(tmp_path)
    loaded, info = target.from_pretrained(tmp_path, output_loading_info=True)
    head = {"classifier.weight", "classifier.bias"}
    is_head = [cls is RaptorForImageClassification for cls in (source, target)]
    assert set(info["missing_keys"]) == (head if is_head == [False, True] else set())
    assert set(info["unexpected_keys"]) == (head if is_head == [True, False] else set())
    own, other = (getattr(model, "raptor", model).state_dict() for model in (loaded, saved))
    assert all(torch.equal(own[name], other[name]) for name in other)
