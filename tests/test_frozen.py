"""Frozen backbones: features without gradients, and FLOPs against the formula."""

import torch

from raptor_hf.frozen import FrozenBackbone


def flops(config, height, width, num_layers):
    """Matrix products of a ViT with an MLP of four times its width, by hand."""
    patches = (height // 14) * (width // 14)
    tokens, size = patches + 1 + config.num_register_tokens, config.hidden_size
    inner = config.intermediate_size
    layer = 2 * tokens * (4 * size * size + 2 * size * inner) + 4 * tokens * tokens * size
    return num_layers * layer + 2 * patches * 3 * 14 * 14 * size


def test_flops_are_those_of_the_matrix_products(make_model, make_teacher):
    model = make_model(image_size=56, depth_scale=False)
    assert FrozenBackbone(model).flops(56, 42) == flops(model.config, 56, 42, model.config.num_hidden_layers)
    teacher = FrozenBackbone(make_teacher(image_size=56, num_hidden_layers=5))
    assert teacher.flops(28, 28) == flops(model.config, 28, 28, 5)


def test_features_are_float32_without_gradients(make_model):
    model = make_model(image_size=56).to(torch.bfloat16)
    frozen = FrozenBackbone(model)
    features = frozen(torch.zeros(2, 3, 56, 56, dtype=torch.bfloat16))
    assert features.dtype == torch.float32
    assert not features.requires_grad
    assert features.shape[-1] == frozen.hidden_size
    assert not model.training
