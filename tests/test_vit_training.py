"""A ViT that learns to classify: snapshots, interruption, wrong input; and the pixels of the digits."""

import json

import pytest
import torch
from transformers import AutoModelForImageClassification, BitImageProcessorPil, TrainerCallback

from raptor_hf import Teacher, vit_training
from raptor_hf.data import PixelDataset, load_images
from raptor_hf.vit_training import (
    KeptPixels,
    ViTTrainingArguments,
    digits_config,
    digits_processor,
    is_saved,
    jitter,
    snapshot_folder,
    train_vit,
)


@pytest.fixture
def small():
    """Sizes too small to learn much, and 40 digits."""
    processor = digits_processor()
    pixels = KeptPixels(load_images("digits", split="train", max_images=40), processor)
    return digits_config(num_hidden_layers=2, hidden_size=16, num_attention_heads=2), processor, pixels


def weights(folder):
    return AutoModelForImageClassification.from_pretrained(folder).state_dict()


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left) and left.keys() == right.keys()


def test_a_vit_learns_and_is_kept_at_the_epochs_asked_for(small, tmp_path):
    args = ViTTrainingArguments(num_epochs=3, batch_size=8, snapshots=(0, 2), use_cpu=True)
    train_vit(*small[:2], small[2], tmp_path, args, transform=jitter)
    assert is_saved(tmp_path)
    assert is_saved(snapshot_folder(tmp_path, 0))
    assert is_saved(snapshot_folder(tmp_path, 2))
    assert not is_saved(snapshot_folder(tmp_path, 1))
    assert not list(tmp_path.glob("checkpoint-*"))
    first, second, last = (weights(folder) for folder in (tmp_path / "epoch0", tmp_path / "epoch2", tmp_path))
    assert not same(first, second)
    assert not same(second, last)
    assert Teacher.from_pretrained(tmp_path).num_layers == 2
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    train_vit(*small[:2], small[2], tmp_path, args, transform=jitter)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before, "a finished training was done again"


def test_an_interrupted_training_goes_on_and_ends_with_the_same_weights(small, tmp_path, monkeypatch):
    args = ViTTrainingArguments(num_epochs=3, batch_size=8, snapshots=(0, 1, 3), use_cpu=True)
    train_vit(*small[:2], small[2], tmp_path / "whole", args, transform=jitter)

    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 12:  # in the third epoch of five steps
                raise KeyboardInterrupt

    own = vit_training._ViTTrainer

    def interrupted(*args, callbacks, **kwargs):
        return own(*args, callbacks=[*callbacks, Interrupt()], **kwargs)

    monkeypatch.setattr(vit_training, "_ViTTrainer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_vit(*small[:2], small[2], tmp_path / "cut", args, transform=jitter)
    assert not is_saved(tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "checkpoint-10" / "trainer_state.json").read_text())["global_step"] == 10
    monkeypatch.setattr(vit_training, "_ViTTrainer", own)
    train_vit(*small[:2], small[2], tmp_path / "cut", args, transform=jitter)
    for folder in ("", "epoch0", "epoch1", "epoch3"):
        assert same(weights(tmp_path / "cut" / folder), weights(tmp_path / "whole" / folder)), folder


def test_training_goes_on_from_another_one(small, tmp_path):
    train_vit(*small[:2], small[2], tmp_path / "a", ViTTrainingArguments(num_epochs=1, batch_size=8, use_cpu=True))
    more = ViTTrainingArguments(
        num_epochs=1, batch_size=8, schedule="constant", warmup_steps=0, snapshots=(0,), weight_decay=0, use_cpu=True
    )
    train_vit(*small[:2], small[2], tmp_path / "b", more, start=tmp_path / "a")
    assert same(weights(tmp_path / "b" / "epoch0"), weights(tmp_path / "a"))
    assert not same(weights(tmp_path / "b"), weights(tmp_path / "a"))


def test_wrong_input_is_named(small, tmp_path):
    with pytest.raises(ValueError, match=r"num_epochs=0 must be at least 1"):
        ViTTrainingArguments(num_epochs=0)
    with pytest.raises(ValueError, match=r"snapshots=\[0, 9\]: epochs are 0 to num_epochs=3"):
        ViTTrainingArguments(num_epochs=3, snapshots=[0, 9])
    with pytest.raises(ValueError, match=r"learning_rate=nan must be above 0"):
        ViTTrainingArguments(learning_rate=float("nan"))
    images = load_images("digits", split="train", max_images=8)
    images.labels = None
    with pytest.raises(ValueError, match=r"digits has no labels, from which a ViT could learn"):
        train_vit(*small[:2], PixelDataset(images, small[1]), tmp_path, ViTTrainingArguments())


def test_the_digits_processor_scales_to_sixteen_pixels():
    assert isinstance(digits_processor(), BitImageProcessorPil)
    pixels = KeptPixels(load_images("digits", split="test", max_images=2), digits_processor())
    assert pixels[0]["pixel_values"].shape == (3, 16, 16)
    assert pixels[0]["pixel_values"].min() == pytest.approx(-1)
    assert pixels[0]["pixel_values"] is pixels[0]["pixel_values"], "it is kept"


def test_jitter_moves_digits_a_little_and_keeps_the_black():
    pixels = KeptPixels(load_images("digits", split="test", max_images=8), digits_processor())
    batch = torch.stack([pixels[index]["pixel_values"] for index in range(8)])
    moved = jitter({"pixel_values": batch, "labels": torch.arange(8)})
    assert moved["pixel_values"].shape == batch.shape == (8, 3, 16, 16)
    assert moved["pixel_values"].min() >= -1.001
    distance = (moved["pixel_values"] - batch).square().mean()
    assert 0 < distance < 0.7 * batch.var()  # two different digits are about twice the variance apart
    assert torch.equal(moved["labels"], torch.arange(8))
