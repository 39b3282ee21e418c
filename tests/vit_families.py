"""Tiny models of every family of ViTs that can be measured."""

import torch
from transformers import AutoConfig, AutoModel

from raptor_hf.vision_models import without_pooler

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}
# Fields beside those of SIZES, and the token groups.
FAMILIES = {
    "dinov2": ({}, ("cls", "patch")),
    "dinov2_with_registers": ({"num_register_tokens": 2}, ("cls", "registers", "patch")),
    "dinov3_vit": ({"num_register_tokens": 2, "intermediate_size": 32}, ("cls", "registers", "patch")),
    "vit": ({"intermediate_size": 32}, ("cls", "patch")),
    "deit": ({"intermediate_size": 32}, ("cls", "registers", "patch")),
    "clip_vision_model": ({"intermediate_size": 32}, ("cls", "patch")),
    "siglip_vision_model": ({"intermediate_size": 32}, ("patch",)),
    "beit": ({"intermediate_size": 32, "use_relative_position_bias": True}, ("cls", "patch")),
    "data2vec-vision": ({"intermediate_size": 32}, ("cls", "patch")),
    "vit_mae": ({"intermediate_size": 32}, ("cls", "patch")),
    "vit_msn": ({"intermediate_size": 32}, ("cls", "patch")),
    "ijepa": ({"intermediate_size": 32}, ("patch",)),
}


def make_config(family):
    """A tiny configuration of one of `FAMILIES`, or a model of images and texts."""
    if family in ("clip", "siglip"):
        vision = {**SIZES, "intermediate_size": 32}
        return AutoConfig.for_model(family, vision_config=vision, text_config=TEXT)
    return AutoConfig.for_model(family, **SIZES, **FAMILIES[family][0])


def make_model(family):
    """A tiny model of a family, random weights."""
    torch.manual_seed(0)
    config = make_config(family)
    return AutoModel.from_config(config, **without_pooler(config))
