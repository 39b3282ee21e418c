"""Stored predictions: what was saved comes back, small, with classes that stay classes."""

import numpy as np
import pytest
from PIL import Image

from raptor_hf.predictions import LONGEST_SIDE, chosen, load_predictions, save_pairs, save_predictions


def pair(height, width, label):
    return {"image": Image.new("RGB", (width, height), (10, 20, 30)), "label": label}


@pytest.mark.parametrize(
    ("count", "number", "expected"), [(10, 4, [0, 3, 6, 9]), (2, 4, [0, 1]), (5, 1, [0]), (3, 0, [])]
)
def test_images_are_chosen_evenly(count, number, expected):
    assert chosen(count, number) == expected


def test_small_maps_come_back_exactly(tmp_path):
    classes = np.random.default_rng(0).integers(0, 256, (5, 7))
    depths = np.random.default_rng(1).random((6, 4)).astype(np.float32)
    depths[0, 0] = np.nan
    save_pairs(tmp_path, [pair(5, 7, classes), pair(6, 4, depths)])
    save_predictions(tmp_path, "raptor-k2", [classes, depths])
    images, labels, found = load_predictions(tmp_path, ["teacher", "raptor-k2"])
    assert [image.shape for image in images] == [(5, 7, 3), (6, 4, 3)]
    assert (images[0] == [10, 20, 30]).all()
    assert list(found) == ["raptor-k2"]  # the teacher has none
    for maps in (labels, found["raptor-k2"]):
        assert np.array_equal(maps[0], classes)
        assert np.array_equal(maps[1], depths, equal_nan=True)


def test_large_pictures_are_made_small_and_classes_are_not_mixed(tmp_path):
    mask = np.full((600, 400), 3)
    mask[300:] = 250
    save_pairs(tmp_path, [pair(600, 400, mask)])
    images, labels, _ = load_predictions(tmp_path, [])
    assert images[0].shape == (LONGEST_SIDE, 171, 3)
    assert labels[0].shape == (LONGEST_SIDE, 171)
    assert set(np.unique(labels[0])) == {3, 250}


def test_nothing_is_made_of_a_folder_without_images(tmp_path):
    assert load_predictions(tmp_path / "none", ["teacher"]) is None


def test_a_model_may_not_hide_the_images(tmp_path):
    with pytest.raises(ValueError, match="a model called 'images' has the name of the images' own file; rename it"):
        save_predictions(tmp_path, "images", [])
