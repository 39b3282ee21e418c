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
from raptor_hf.probe_heads import load_head, model_with_head
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


@pytest.mark.parametrize("backbone", ["teacher"], indirect=True)
def test_a_probe_starts_from_a_saved_head(backbone, photos, make_model, tmp_path):
    images = load_images([{"image": picture, "label": label} for picture, label in photos], image_column="image")
    options = ProbeArguments(learning_rate=1e-2, num_epochs=20, batch_size=5, augment="none", seeds=(0,))
    probe = LinearProbe(images, images, options)
    trained = probe(backbone, dinov2_processor(56))
    saved(backbone, trained.head, probe, tmp_path / "model", AutoModelForImageClassification)
    head = load_head(str(tmp_path / "model"), IMAGE_CLASSIFICATION.name, images.label_names)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    unchanged = LinearProbe(images, images, dataclasses.replace(options, num_epochs=0), start=head)
    result = unchanged(backbone, dinov2_processor(56))
    assert result.values == trained.values
    assert torch.equal(result.head.weight, trained.head.weight)
    tuned = LinearProbe(images, images, dataclasses.replace(options, select="best", num_epochs=3), start=head)
    raptor = make_model(image_size=56)
    assert tuned(raptor, dinov2_processor(56)).values[0] >= unchanged(raptor, dinov2_processor(56)).values[0]
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in before.items())
    with pytest.raises(ValueError, match=r"takes 64 features to 2 outputs, but the backbone has 128 features"):
        LinearProbe(images, images, options, start=head)(make_model(hidden_size=64), dinov2_processor(28))


@pytest.mark.parametrize("backbone", ["raptor"], indirect=True)
def test_a_head_that_does_not_fit_is_refused(backbone, photos, tmp_path):
    images = load_images([{"image": picture, "label": label} for picture, label in photos], image_column="image")
    images.label_names = ["cat", "dog"]
    probe = LinearProbe(images, images, ProbeArguments(num_epochs=0, seeds=(0,), augment="none"))
    saved(backbone, torch.nn.Linear(64, 2), probe, tmp_path / "model", AutoModelForImageClassification)
    assert load_head(str(tmp_path / "model"), IMAGE_CLASSIFICATION.name, ["n01", "n02"]).out_features == 2
    with pytest.raises(ValueError, match=r"the classes of the images in another order"):
        load_head(str(tmp_path / "model"), IMAGE_CLASSIFICATION.name, ["dog", "cat"])
    backbone.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"bare has no trained linear head"):
        load_head(str(tmp_path / "bare"), IMAGE_CLASSIFICATION.name)


@pytest.mark.parametrize("backbone", ["raptor"], indirect=True)
def test_a_dense_probe_starts_from_a_saved_head(backbone, tmp_path):
    root = dense_sets.make_ade(tmp_path / "ade", train=4, validation=2)
    arguments = scaled(SEGMENTATION_ARGUMENTS, num_epochs=2, **{**FAST, "seeds": (0,)})
    pairs = load_segmentation(root, "train"), load_segmentation(root)
    probe = DenseProbe(SEGMENTATION, *pairs, arguments)
    trained = probe(backbone, dinov2_processor(56))
    saved(backbone, trained.head, probe, tmp_path / "model", AutoModelForSemanticSegmentation)
    head = load_head(str(tmp_path / "model"), SEGMENTATION.name)
    again = DenseProbe(SEGMENTATION, *pairs, dataclasses.replace(arguments, num_epochs=0), start=head)
    assert again(backbone, dinov2_processor(56)).values == trained.values
