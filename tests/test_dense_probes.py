"""Dense probes: features of patches alone, losses against plain computations, and heads that learn the twins."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import dense_sets
from raptor_hf import RaptorModel
from raptor_hf.data import dinov2_processor
from raptor_hf.dense_data import DenseDataset, load_depth, load_segmentation
from raptor_hf.dense_pixels import Frame
from raptor_hf.dense_probes import (
    DEPTH,
    DEPTH_ARGUMENTS,
    SEGMENTATION,
    SEGMENTATION_ARGUMENTS,
    DenseProbe,
    DenseProbeArguments,
    probe_bins,
    scaled,
)
from raptor_hf.modeling_raptor_dense import patch_and_cls_features, patch_features
from raptor_hf.tokens import TokenLayout

FAST = {"image_size": (42, 56), "batch_size": 4, "seeds": (0,), "learning_rate": 3e-2, "augment": "none"}


@pytest.fixture
def teacher(make_teacher):
    return make_teacher(image_size=56)


@pytest.fixture
def processor():
    return dinov2_processor(56)


@pytest.fixture
def segmentation(tmp_path):
    """Factory: a probe of the twin of ADE20k."""
    root = dense_sets.make_ade(tmp_path, train=6, validation=3)

    def make(**options):
        arguments = scaled(SEGMENTATION_ARGUMENTS, **{**FAST, "num_epochs": 15, **options})
        return DenseProbe(SEGMENTATION, load_segmentation(root, "train"), load_segmentation(root), arguments)

    return make


@pytest.fixture
def depth(tmp_path):
    """Factory: a probe of the twin of NYUv2."""
    root = dense_sets.make_nyu_csv(tmp_path, train=6, test=3)

    def make(**options):
        options = {**FAST, "num_epochs": 15, "crop": "none", **options}
        return DenseProbe(DEPTH, load_depth(root, "train"), load_depth(root), scaled(DEPTH_ARGUMENTS, **options))

    return make


# ---- Parts ----


@pytest.mark.parametrize("registers", [0, 2, 4])
def test_features_are_patches_in_their_places_without_registers(registers):
    layout, grid = TokenLayout(registers), (2, 3)
    states = torch.randn(2, 1 + registers + 6, 5)
    patches, both = patch_features(states, layout, grid), patch_and_cls_features(states, layout, grid)
    assert (patches.shape, both.shape) == ((2, 5, 2, 3), (2, 10, 2, 3))
    assert torch.equal(patches[1, :, 1, 2], states[1, -1])
    assert torch.equal(patches[0, :, 0, 1], states[0, 1 + registers + 1])
    assert torch.equal(both[1, 5:, 0, 2], states[1, 0])
    disturbed = states.clone()
    disturbed[:, 1 : 1 + registers] = 1e6
    assert torch.equal(patch_and_cls_features(disturbed, layout, grid), both)


def test_bins_cover_the_range_and_invalid_depths_have_none():
    depths = torch.tensor([0.0, -1.0, math.nan, math.inf, 10.1, 0.001, 9.97, 10.0, 5.0])
    bins = probe_bins().numbers(depths)
    assert bins[:5].tolist() == [-100] * 5
    assert bins[5:8].tolist() == [0, 255, 255]
    centres = probe_bins().centres()
    assert (centres[bins[5:]] - depths[5:]).abs().max() <= (10 - 0.001) / 256 / 2 + 1e-6
    assert centres[255] == pytest.approx(9.98, abs=0.001)


def test_a_depth_is_the_mean_of_bins_by_their_weight():
    logits = torch.full((1, 256, 2, 2), -50.0)
    logits[:, 10], logits[:, 20] = 0.0, math.log(3)
    depth = probe_bins().depths(logits)
    assert depth.shape == (1, 1, 8, 8)
    expected = 0.25 * probe_bins().centres()[10] + 0.75 * probe_bins().centres()[20]
    torch.testing.assert_close(depth, expected.expand(1, 1, 8, 8))


@pytest.mark.parametrize("silog", ["adabins", "code"])
def test_the_depth_loss_is_the_papers(silog):
    arguments = DenseProbeArguments(silog=silog)
    frame = Frame((8, 8), 4)  # a grid of 2 x 2, resized to 8 x 8: depths and labels meet pixel by pixel
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 256, 2, 2, generator=generator)
    labels = 9 * torch.rand(2, 8, 8, generator=generator) + 0.5
    labels[0, :3] = 0  # no depth
    labels[1, 5] = 11.0  # out of range
    valid = (labels > 0) & (labels <= 10)
    error = (probe_bins().depths(logits)[:, 0][valid] + 1e-3).log() - (labels[valid] + 1e-3).log()
    squared = (error**2).mean() - 0.85 * error.mean() ** 2
    fine = torch.nn.functional.interpolate(logits, scale_factor=4, mode="bilinear").permute(0, 2, 3, 1)[valid]
    targets = ((labels[valid] - 1e-3) / (10 - 1e-3) * 256).long().clamp(max=255)
    expected = 10 * (squared.sqrt() if silog == "adabins" else squared)
    expected = expected + torch.nn.functional.cross_entropy(fine, targets)
    torch.testing.assert_close(DEPTH.loss(logits, labels, frame, arguments), expected)


def test_the_farthest_depth_can_be_learnt():
    """9.97 m is in a bin that counts, and its middle is 9.98 m."""
    frame, labels = Frame((4, 4), 4), torch.full((1, 4, 4), 9.97)
    logits = torch.zeros(1, 256, 1, 1, requires_grad=True)
    optimizer = torch.optim.Adam([logits], 0.5)
    first = DEPTH.loss(logits, labels, frame, DEPTH_ARGUMENTS)
    assert first > 1
    for _ in range(60):
        optimizer.zero_grad()
        DEPTH.loss(logits, labels, frame, DEPTH_ARGUMENTS).backward()
        optimizer.step()
    assert probe_bins().depths(logits).mean().item() == pytest.approx(9.98, abs=0.02)


def test_pixels_to_ignore_have_no_loss_and_no_gradient():
    frame, arguments = Frame((28, 28), 14), SEGMENTATION_ARGUMENTS
    logits = torch.randn(1, 150, 2, 2, requires_grad=True)
    nothing = torch.full((1, 28, 28), 255)
    for loss in (
        SEGMENTATION.loss(logits, nothing, frame, arguments),
        DEPTH.loss(torch.randn(1, 256, 2, 2, requires_grad=True), torch.zeros(1, 28, 28), frame, DEPTH_ARGUMENTS),
    ):
        assert loss == 0
        loss.backward()
    assert logits.grad.abs().max() == 0
    half = nothing.clone()
    half[:, :, :14] = 7
    resized = frame.to_labels(logits, (28, 28)).permute(0, 2, 3, 1)[half != 255]
    expected = torch.nn.functional.cross_entropy(resized, torch.full((len(resized),), 7))
    torch.testing.assert_close(SEGMENTATION.loss(logits, half, frame, arguments), expected)


# ---- Probes ----


def test_a_segmentation_is_learnt_and_shuffled_masks_are_not(segmentation, teacher, processor):
    probe = segmentation()
    result = probe(teacher, processor)
    assert (result.task, result.metric, result.num_scored) == ("semantic-segmentation", "mean_iou", 3)
    assert result.details[0]["pixel_accuracy"] > 0.6
    assert result.details[0]["num_images"] == 3
    assert result.values == [result.details[0]["mean_iou"]]
    masks = probe.train_pairs
    turned = [np.roll(masks[index]["label"], index * 11, axis=0)[::-1].copy() for index in range(6)]
    images = [masks[index]["image"] for index in range(6)]
    probe.train_pairs = DenseDataset(images, turned, lambda label, name: label, "turned")
    assert probe(teacher, processor).mean < 0.7 * result.mean


@pytest.mark.parametrize("kind", ["segmentation", "depth"])
def test_predictions_are_those_that_were_scored(kind, request, teacher, processor):
    probe, heads = request.getfixturevalue(kind)(num_epochs=2), []
    values = probe(teacher, processor, keep=lambda seed, head: heads.append(head)).to_dict()
    found = probe.predict(teacher, processor, heads[0], [2, 0])
    labels = [probe.eval_pairs[index]["label"] for index in (2, 0)]
    assert [tuple(one.shape) for one in found] == [label.shape for label in labels]
    found = [*found, *probe.predict(teacher, processor, heads[0], [1])]
    labels.append(probe.eval_pairs[1]["label"])
    if kind == "segmentation":
        pairs = [(one.numpy()[label != 255], label[label != 255]) for one, label in zip(found, labels, strict=True)]
        share = sum((one == label).sum() for one, label in pairs) / sum(label.size for _, label in pairs)
        assert values["details"][0]["pixel_accuracy"] == pytest.approx(share)
    else:
        squares = []
        for one, label in zip(found, labels, strict=True):
            valid = (label > 1e-3) & (label < 10)
            squares.append((one.numpy().clip(1e-3, 10) - label)[valid] ** 2)
        assert values["rmse"][0] == pytest.approx(math.sqrt(np.concatenate(squares).mean()), rel=1e-5)


def test_a_depth_is_learnt(depth, teacher, processor):
    untrained, trained = depth(num_epochs=0)(teacher, processor), depth()(teacher, processor)
    assert (trained.task, trained.metric, trained.greater_is_better) == ("depth-estimation", "rmse", False)
    assert trained.mean < 0.7 * untrained.mean
    assert trained.details[0]["delta1"] > untrained.details[0]["delta1"]
    assert trained.retained(untrained) == untrained.mean / trained.mean > 1


@pytest.mark.parametrize("kind", ["segmentation", "depth"])
def test_teacher_and_exact_copy_have_the_same_values(kind, request, teacher, processor):
    probe = request.getfixturevalue(kind)(num_epochs=2, augment="crop_flip", seeds=(0, 1))
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    torch.manual_seed(3)
    own = probe(teacher, processor)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.rand(1) == after  # the global generator is not used
    student = probe(RaptorModel.from_teacher(teacher, (1, 1, 1)), processor)
    assert own.values == pytest.approx(student.values, rel=1e-5)
    assert len(own.values) == 2
    assert own.values[0] != own.values[1]
    assert all(torch.equal(value, before[name]) for name, value in teacher.model.state_dict().items())


def test_both_ways_of_reading_images_learn(segmentation, teacher, processor):
    values = [segmentation(augment=augment, seeds=(0,))(teacher, processor).mean for augment in ("none", "crop_flip")]
    assert min(values) > 0.05
    assert values[0] != values[1]


def test_best_is_the_least_error_and_counts_the_start(depth, teacher, processor):
    ruined = depth(learning_rate=1e4, num_epochs=2, select="best")(teacher, processor)
    start = depth(num_epochs=0)(teacher, processor)
    assert ruined.mean <= start.mean


@pytest.mark.parametrize("eval_size", ["native", "input"])
def test_labels_are_scored_at_the_size_that_was_asked_for(eval_size, segmentation, teacher, processor):
    result = segmentation(eval_size=eval_size, num_epochs=1)(teacher, processor)
    pixels = 45 * 60 if eval_size == "native" else 42 * 56
    assert pixels * 0.8 * 3 < result.details[0]["num_pixels"] < pixels * 3


def test_the_eigen_crop_is_of_native_pictures(tmp_path, teacher, processor):
    root = dense_sets.make_nyu_csv(tmp_path, train=1, test=1, size=(480, 640))
    arguments = scaled(DEPTH_ARGUMENTS, **{**FAST, "num_epochs": 1})
    result = DenseProbe(DEPTH, load_depth(root, "train"), load_depth(root), arguments)(teacher, processor)
    assert result.details[0]["num_pixels"] == 426 * 560


def test_protocols_are_the_papers():
    ade, nyu = SEGMENTATION_ARGUMENTS, DEPTH_ARGUMENTS
    assert (ade.learning_rate, ade.weight_decay, ade.num_epochs, ade.batch_size) == (1e-3, 1e-2, 10, 32)
    assert (ade.image_size, ade.scale, ade.warmup_steps, ade.max_grad_norm, ade.schedule) == (
        (518, 518), (0.5, 1.0), 100, 1.0, "cosine"
    )  # fmt: skip
    assert (nyu.learning_rate, nyu.weight_decay, nyu.num_epochs, nyu.batch_size) == (1e-3, 1e-3, 25, 128)
    assert (nyu.image_size, nyu.augment, nyu.warmup_steps, nyu.max_grad_norm, nyu.schedule) == (
        (480, 640), "crop_flip_jitter", 0, 0.0, "constant"
    )  # fmt: skip
    assert (ade.select, ade.eval_size, nyu.crop, nyu.align) == ("last", "native", "eigen", "padding")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_size": "518"}, "eval_size='518' is unknown; use one of native, input"),
        ({"silog": "root"}, "silog='root' is unknown; use one of adabins, code"),
        ({"crop": "garg"}, "crop='garg' is unknown; use one of none, eigen"),
        ({"align": "left"}, "align='left' is unknown"),
        ({"schedule": "step"}, "schedule='step' is unknown; use one of cosine, constant"),
        ({"image_size": (0, 5)}, r"image_size=\(0, 5\)"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SEGMENTATION_ARGUMENTS, **options)


def test_an_empty_set_is_named(segmentation):
    probe = segmentation()
    with pytest.raises(ValueError, match="the evaluation set of a probe is empty"):
        DenseProbe(SEGMENTATION, probe.train_pairs, probe.eval_pairs.select([]))
