"""Mean IoU and depth errors: against scikit-learn and plain numpy, with the pixels that must not count."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, jaccard_score

from raptor_hf.dense_metrics import DEPTH_METRICS, DepthRange, DepthScores, SegmentationScores, map_labels

NO_CROP = DepthRange(crop="none")


def label_maps(seed=0, shape=(5, 9, 7), classes=6):
    """Predictions and labels of `classes` classes, the last of which is in neither, with pixels to ignore."""
    rng = np.random.default_rng(seed)
    predictions, references = rng.integers(0, classes - 1, (2, *shape))
    references[rng.random(shape) < 0.2] = 255
    return torch.from_numpy(predictions), torch.from_numpy(references)


def depth_maps(seed=0, shape=(4, 8, 6)):
    """Predictions and labels in metres, some of which are no depths."""
    rng = np.random.default_rng(seed)
    references = rng.uniform(0.5, 9.5, shape)
    predictions = references * rng.lognormal(0, 0.3, shape)
    for value in (0.0, np.nan, np.inf, 10.0, 1e-3):
        references[rng.random(shape) < 0.05] = value
    return torch.from_numpy(predictions), torch.from_numpy(references)


def test_iou_is_scikit_learns():
    predictions, references = label_maps()
    scores = SegmentationScores(6)
    for start in (0, 2, 4):
        scores.update(predictions[start : start + 2], references[start : start + 2])
    result = scores.compute()
    scored = references != 255
    predicted, labelled = predictions[scored].numpy(), references[scored].numpy()
    expected = jaccard_score(labelled, predicted, average=None, labels=range(5))
    assert result["iou"][:5] == pytest.approx(expected, abs=1e-12)
    assert result["iou"][5] is None  # in neither
    assert result["mean_iou"] == pytest.approx(expected.mean(), abs=1e-12)
    assert result["pixel_accuracy"] == pytest.approx(accuracy_score(labelled, predicted), abs=1e-12)
    assert (result["num_images"], result["num_pixels"]) == (5, scored.sum())
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("predictions", "references", "classes", "iou", "mean"),
    [
        ([0, 1, 1, 2], [0, 1, 0, 255], 3, [0.5, 0.5, None], 0.5),  # what is predicted on an ignored pixel is nothing
        ([0, 1, 1, 2], [0, 1, 0, 0], 3, [1 / 3, 0.5, 0.0], (1 / 3 + 0.5) / 3),  # predicted alone: 0, and counted
        ([0, 0, 1, 1], [0, 0, 0, 0], 2, [0.5, 0.0], 0.25),
        ([0, 0, 1, 1] + [1] * 100, [0, 0, 0, 0] + [255] * 100, 2, [0.5, 0.0], 0.25),
        ([9, 0], [255, 0], 1, [1.0], 1.0),  # not even a class, where nothing is scored
    ],
)
def test_absent_and_ignored(predictions, references, classes, iou, mean):
    scores = SegmentationScores(classes)
    scores.update(torch.tensor([predictions]), torch.tensor([references]))
    result = scores.compute()
    assert result["iou"] == pytest.approx(iou)
    assert result["mean_iou"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ([[0, 3]], [[0, 1]], "predictions hold 3, which is none of the classes 0 .. 2"),
        ([[0, -1]], [[0, 1]], "predictions hold -1"),
        ([[0, 1]], [[0, 150]], r"labels hold 150, which is none .* labels may have to be mapped first"),
        ([[0, 1]], [[0, 1], [1, 1]], r"predictions of shape \(1, 1, 2\) for labels of \(1, 2, 2\); resize the logits"),
        ([0, 1], [0, 1], r"maps of shape \(2,\); give \(height, width\)"),
    ],
)
def test_what_is_no_label_map_is_named(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        SegmentationScores(3).update(torch.tensor(predictions), torch.tensor(references))


def test_nothing_to_score_and_wrong_numbers():
    scores = SegmentationScores(3)
    scores.update(torch.zeros(1, 2, 2, dtype=torch.long), torch.full((1, 2, 2), 255))
    with pytest.raises(ValueError, match="none of 1 images has a pixel to score"):
        scores.compute()
    with pytest.raises(ValueError, match=r"num_classes=256, ignore_index=255: .* outside of 0 .. 255"):
        SegmentationScores(256)
    with pytest.raises(ValueError, match="at least one class"):
        SegmentationScores(0)


@pytest.mark.parametrize("kind", ["segmentation", "depth"])
def test_sums_of_two_processes_are_those_of_one(kind):
    def new():
        return SegmentationScores(6) if kind == "segmentation" else DepthScores(NO_CROP)

    predictions, references = label_maps() if kind == "segmentation" else depth_maps()
    whole, first, second, joined = new(), new(), new(), new()
    whole.update(predictions, references)
    first.update(predictions[0], references[0])
    second.update(predictions[1:], references[1:])
    joined.load_state(first.state() + second.state())
    expected = whole.compute()
    assert joined.compute().pop("iou", None) == expected.pop("iou", None)
    result = joined.compute()
    result.pop("iou", None)
    assert result == pytest.approx(expected, rel=1e-12)


def numpy_depth(predicted, labelled):
    """The metrics of pixels, written down once more."""
    error, ratio = np.log(predicted) - np.log(labelled), np.maximum(predicted / labelled, labelled / predicted)
    return {
        "rmse": np.sqrt(np.mean((predicted - labelled) ** 2)),
        "abs_rel": np.mean(np.abs(predicted - labelled) / labelled),
        "log10": np.mean(np.abs(np.log10(predicted) - np.log10(labelled))),
        "silog": 100 * np.sqrt(np.mean(error**2) - np.mean(error) ** 2),
        **{f"delta{power}": np.mean(ratio < 1.25**power) for power in (1, 2, 3)},
    }


def test_depth_errors_pooled_and_per_image():
    predictions, references = depth_maps()
    scores = DepthScores(NO_CROP)
    scores.update(predictions[:3], references[:3])
    scores.update(predictions[3], references[3])
    result = scores.compute()
    values, labels = predictions.clamp(1e-3, 10).numpy(), references.numpy()
    valid = np.isfinite(labels) & (labels > 1e-3) & (labels < 10)
    pooled = numpy_depth(values[valid], labels[valid])
    images = [numpy_depth(v[m], d[m]) for v, d, m in zip(values, labels, valid, strict=True)]
    assert set(pooled) == set(DEPTH_METRICS)
    for name in DEPTH_METRICS:
        assert result[name] == pytest.approx(pooled[name], rel=1e-9), name
        assert result[f"{name}_per_image"] == pytest.approx(np.mean([image[name] for image in images]), rel=1e-9), name
    assert (result["num_images"], result["num_empty"], result["num_pixels"]) == (4, 0, valid.sum())
    json.dumps(result, allow_nan=False)


def test_only_the_eigen_crop_is_scored():
    references = torch.full((480, 640), 2.0)
    predictions = torch.full((480, 640), 9.0)
    predictions[45:471, 41:601] = 2.0
    scores = DepthScores()
    scores.update(predictions, references)
    assert (scores.compute()["rmse"], scores.compute()["num_pixels"]) == (0.0, 426 * 560)
    predictions[45, 41] = 3.0  # its first pixel
    scores = DepthScores()
    scores.update(predictions, references)
    assert scores.compute()["rmse"] == pytest.approx(1 / math.sqrt(426 * 560))
    with pytest.raises(ValueError, match="defined for 480 x 640 pixels, not for 60 x 80; keep the labels' native size"):
        scores.update(predictions[:60, :80], references[:60, :80])


def test_predictions_are_clamped_and_must_be_numbers():
    scores = DepthScores(NO_CROP)
    scores.update(torch.tensor([[-1.0, 50.0]]), torch.tensor([[1.0, 9.0]]))
    assert scores.compute()["rmse"] == pytest.approx(math.sqrt((0.999**2 + 1) / 2), rel=1e-9)
    with pytest.raises(ValueError, match="a predicted depth is not a finite number"):
        scores.update(torch.tensor([[math.nan]]), torch.tensor([[1.0]]))
    with pytest.raises(ValueError, match="resize the predictions to the labels' native size"):
        scores.update(torch.ones(2, 2), torch.ones(2, 3))


def test_images_without_a_depth_count_for_nothing():
    scores = DepthScores(NO_CROP)
    scores.update(torch.ones(1, 2, 2), torch.zeros(1, 2, 2))
    with pytest.raises(ValueError, match=r"none of 1 images has a depth between 0.001 and 10.0 m .* metres"):
        scores.compute()
    scores.update(torch.full((1, 2, 2), 3.0), torch.full((1, 2, 2), 2.0))
    result = scores.compute()
    assert (result["rmse"], result["rmse_per_image"], result["num_images"], result["num_empty"]) == (1.0, 1.0, 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minimum": 0.0}, r"minimum=0.0, maximum=10.0: give 0 < minimum < maximum"),
        ({"maximum": 1e-4}, "minimum=0.001, maximum=0.0001"),
        ({"crop": "garg"}, "crop='garg' is unknown; use one of none, eigen"),
    ],
)
def test_ranges_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        DepthRange(**options)


def test_labels_are_mapped_at_once_and_on_a_copy():
    labels = torch.tensor([[0, 1, 1]])
    assert map_labels(labels, [1, 0]).tolist() == [[1, 0, 0]]
    assert labels.tolist() == [[0, 1, 1]]
    assert map_labels(torch.tensor([0, 1, 150], dtype=torch.uint8), [255, *range(150)]).tolist() == [255, 0, 149]
    assert map_labels(torch.zeros(0), [1]).tolist() == []
    with pytest.raises(ValueError, match=r"label 151 is outside of the mapping of 0 .. 150"):
        map_labels(torch.tensor([0, 151]), [255, *range(150)])
