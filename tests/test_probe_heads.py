"""Heads as models: what is saved computes what was probed."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
)

import dense_sets
from raptor_hf.data import dinov2_processor, load_images
from raptor_hf.dense_data import load_depth, load_segmentation
from raptor_hf.dense_metrics import DepthRange, DepthScores, SegmentationScores
from raptor_hf.dense_probes import DEPTH, DEPTH_ARGUMENTS, SEGMENTATION, SEGMENTATION_ARGUMENTS, DenseProbe, scaled
from raptor_hf.probe_heads import model_with_head
from raptor_hf.probes import IMAGE_CLASSIFICATION, LinearProbe, ProbeArguments

FAST = {"image_size": (42, 56), "batch_size": 4, "seeds": (0, 1), "learning_rate": 3e-2, "augment": "none"}


@pytest.fixture
def backbone(request, make_teacher, make_model):
    teacher = make_teacher(image_size=56)
    return teacher if request.param == "teacher" else make_model(image_size=56)


@pytest.fixture
def photos():
    """Ten images of two classes."""
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 90 + 80 * (n % 2), (60, 70, 3), dtype=np.uint8)) for n in range(10)]
    return [(picture, n % 2) for n, picture in enumerate(pictures)]


def saved(backbone, head, probe, folder, auto):
    model, processor = model_with_head(backbone, head, dinov2_processor(56), probe)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return auto.from_pretrained(folder).eval(), AutoImageProcessor.from_pretrained(folder)


@pytest.mark.parametrize("backbone", ["teacher", "raptor"], indirect=True)
def test_a_segmentation_scores_what_its_probe_did(backbone, tmp_path):
    root = dense_sets.make_ade(tmp_path / "ade", train=6, validation=3)
    arguments = scaled(SEGMENTATION_ARGUMENTS, num_epochs=8, **FAST)
    probe, heads = DenseProbe(SEGMENTATION, load_segmentation(root, "train"), load_segmentation(root), arguments), {}
    result = probe(backbone, dinov2_processor(56), keep=heads.__setitem__)
    assert set(heads) == {0, 1}
    model, processor = saved(backbone, heads[0], probe, tmp_path / "model", AutoModelForSemanticSegmentation)
    scores = SegmentationScores(150, 255)
    for pair in probe.eval_pairs:
        with torch.no_grad():
            outputs = model(**processor(pair["image"], return_tensors="pt"))
        (classes,) = processor.post_process_semantic_segmentation(outputs, [pair["label"].shape])
        scores.update(classes, torch.from_numpy(pair["label"]).long())
    assert scores.compute()["mean_iou"] == pytest.approx(result.values[0], abs=5e-3)  # two ways to resize an image
    assert result.values[0] > 0.02


@pytest.mark.parametrize("backbone", ["teacher", "raptor"], indirect=True)
def test_a_depth_scores_what_its_probe_did(backbone, tmp_path):
    root = dense_sets.make_nyu_csv(tmp_path / "nyu", train=6, test=3)
    arguments = scaled(DEPTH_ARGUMENTS, num_epochs=8, crop="none", **FAST)
    probe, heads = DenseProbe(DEPTH, load_depth(root, "train"), load_depth(root), arguments), {}
    result = probe(backbone, dinov2_processor(56), keep=heads.__setitem__)
    model, processor = saved(backbone, heads[1], probe, tmp_path / "model", AutoModelForDepthEstimation)
    assert (model.config.num_depth_bins, model.config.max_depth) == (256, 10.0)
    scores = DepthScores(DepthRange(crop="none"))
    for pair in probe.eval_pairs:
        with torch.no_grad():
            outputs = model(**processor(pair["image"], return_tensors="pt"))
        size = pair["label"].shape
        depth = torch.nn.functional.interpolate(outputs.predicted_depth[:, None], size, mode="bilinear")[0, 0]
        scores.update(depth, torch.from_numpy(pair["label"]))
    assert scores.compute()["rmse"] == pytest.approx(result.values[1], rel=0.02)


@pytest.mark.parametrize("backbone", ["teacher", "raptor"], indirect=True)
def test_a_classifier_has_its_classes_and_accuracy(backbone, tmp_path, photos):
    images = load_images(photos)
    probe, heads = LinearProbe(images, images, ProbeArguments(seeds=(0,), augment="none", learning_rate=1e-2)), {}
    result = probe(backbone, dinov2_processor(56), keep=heads.__setitem__)
    model, processor = saved(backbone, heads[0], probe, tmp_path / "model", AutoModelForImageClassification)
    assert list(model.config.id2label.values()) == list(images.label_names or ["LABEL_0", "LABEL_1"])
    with torch.no_grad():
        found = [
            int(model(**processor(row["image"], return_tensors="pt")).logits.argmax()) == row["label"] for row in images
        ]
    assert sum(found) / len(found) == pytest.approx(result.values[0])


def test_sizes_are_whole_patches(make_model, tmp_path):
    root = dense_sets.make_nyu_csv(tmp_path, train=2, test=1)
    arguments = scaled(DEPTH_ARGUMENTS, **{**FAST, "image_size": (48, 64), "num_epochs": 0})
    probe = DenseProbe(DEPTH, load_depth(root, "train"), load_depth(root), arguments)
    head = torch.nn.Conv2d(2 * make_model().config.hidden_size, 256, 1)
    _, processor = model_with_head(make_model(), head, dinov2_processor(56), probe)
    assert dict(processor.size) == {"height": 56, "width": 70}
    assert processor.image_mean == dinov2_processor(56).image_mean


def test_a_task_without_a_model_is_named(make_model, photos):
    images = load_images(photos)
    task = dataclasses.replace(IMAGE_CLASSIFICATION, name="retrieval")
    with pytest.raises(ValueError, match=r"task 'retrieval' has no model; probes of image-classification"):
        model_with_head(make_model(), torch.nn.Identity(), None, LinearProbe(images, images, task=task))
