"""Images and labels that stay together: every transform against its own picture of coordinates."""

import numpy as np
import pytest
import torch
from PIL import Image

import dense_sets
from raptor_hf.data import dinov2_processor
from raptor_hf.dense_data import load_depth, load_segmentation
from raptor_hf.dense_pixels import DensePixels, Frame, collate_dense, jitter


class Plain:
    """An image processor that only makes tensors."""

    def __call__(self, image, **options):
        assert options == {"do_resize": False, "do_center_crop": False, "return_tensors": "pt"}
        return {"pixel_values": torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()}


class Coordinates:
    """Pairs whose label says where a pixel was, as its image does: red is the column, green the row."""

    def __init__(self, width=80, height=60):
        rows, columns = np.mgrid[:height, :width].astype(np.uint8)
        self.label = (rows.astype(np.float32) * 1000 + columns).astype(np.float32)
        self.image = Image.fromarray(np.stack([columns, rows, np.zeros_like(rows)], axis=-1))

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"image": self.image, "label": self.label}


def where(item, frame):
    """Row and column that image and label of an item say, the image without its padding."""
    (top, left), (height, width) = frame.offset, frame.size
    pixels = item["pixel_values"][:, top : top + height, left : left + width]
    rows, columns = item["label"] // 1000, item["label"] % 1000
    return (pixels[1], pixels[0]), (rows, columns)


def test_a_frame_pads_to_the_patch_and_back():
    frame = Frame((480, 640), 14)
    assert (frame.padded, frame.grid, frame.offset) == ((490, 644), (35, 46), (5, 2))
    assert Frame((518, 518), 14).padded == (518, 518)
    values = torch.rand(1, 3, 480, 640)
    padded = frame.pad(values, 0.0)
    assert padded.shape == (1, 3, 490, 644)
    assert padded[..., :5, :].abs().max() == padded[..., -5:, :].abs().max() == 0
    torch.testing.assert_close(frame.to_labels(padded, (480, 640)), values)
    stretched = Frame((480, 640), 14, "paper").to_labels(padded, (480, 640))
    assert (stretched - values).abs().mean() > 0.05
    expected = torch.nn.functional.interpolate(padded, (480, 640), mode="bilinear", align_corners=False)
    torch.testing.assert_close(stretched, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (0, 14)}, r"image_size=\(0, 14\), patch_size=14: all must be positive"),
        ({"align": "corner"}, "align='corner' is unknown; use one of padding, paper"),
    ],
)
def test_frames_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        Frame(**{"size": (28, 28), "patch_size": 14, **options})


@pytest.mark.parametrize(("keep_ratio", "scale"), [(False, (0.5, 1.0)), (True, (0.5, 2.0)), (True, (0.2, 0.3))])
def test_crops_and_flips_move_image_and_label_alike(keep_ratio, scale):
    frame = Frame((60, 80), 14)
    pixels = DensePixels(Coordinates(), Plain(), frame, augment="crop_flip", keep_ratio=keep_ratio, scale=scale, seed=1)
    shares, flips = [], set()
    for epoch in range(12):
        pixels.set_epoch(epoch)
        for index in range(3):
            item = pixels[index]
            assert item["pixel_values"].shape == (3, 70, 84)
            (own_rows, own_columns), (rows, columns) = where(item, frame)
            assert (own_rows - rows).abs().max() <= 2  # bicubic and nearest
            assert (own_columns - columns).abs().max() <= 2
            flips.add(bool(columns[0, 0] > columns[0, -1]))
            shares.append(float(((rows.max() - rows.min() + 1) / 60) * ((columns.max() - columns.min() + 1) / 80)))
            if keep_ratio:
                assert (rows.max() - rows.min() + 1) / 60 == pytest.approx(
                    float((columns.max() - columns.min() + 1) / 80), abs=0.04
                )
    assert flips == {True, False}
    assert scale[0] - 0.06 < min(shares) < max(shares) < min(1, scale[1]) + 0.06
    assert max(shares) - min(shares) > (0.25 if scale[1] >= 1 else 0.05)


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    def item(seed=0, epoch=0, index=0):
        pixels = DensePixels(Coordinates(), Plain(), Frame((60, 80), 14), augment="crop_flip_jitter", seed=seed)
        pixels.set_epoch(epoch)
        return pixels[index]["pixel_values"]

    assert torch.equal(item(), item())
    for other in ({"seed": 1}, {"epoch": 1}, {"index": 1}):
        assert not torch.equal(item(), item(**other))


def test_without_augmentation_nothing_is_cut_and_labels_keep_their_size():
    frame = Frame((30, 40), 10)
    item = DensePixels(Coordinates(), Plain(), frame)[0]
    assert (tuple(item["pixel_values"].shape), tuple(item["label"].shape)) == ((3, 30, 40), (60, 80))
    resized = DensePixels(Coordinates(), Plain(), frame, resize_labels=True)[0]
    (own_rows, own_columns), (rows, columns) = where(resized, frame)
    assert (own_rows - rows).abs().max() <= 2
    assert (own_columns - columns).abs().max() <= 2
    assert columns.min() <= 1 <= 78 <= columns.max()  # the borders are there


def test_labels_are_classes_or_metres(tmp_path):
    pairs = load_segmentation(dense_sets.make_ade(tmp_path), "train")
    ade = DensePixels(pairs, dinov2_processor(), Frame((28, 42), 14), augment="crop_flip")
    assert (ade[0]["label"].dtype, tuple(ade[0]["label"].shape)) == (torch.int64, (28, 42))
    assert set(ade[0]["label"].unique().tolist()) <= {*range(150), 255}  # resized without mixing classes
    nyu = DensePixels(load_depth(dense_sets.make_nyu_h5(tmp_path)), dinov2_processor(), Frame((28, 42), 14))
    batch = collate_dense([nyu[0], nyu[1]])
    assert batch["pixel_values"].shape == (2, 3, 28, 42)
    assert [label.dtype for label in batch["labels"]] == [torch.float32] * 2
    mean = torch.tensor(dinov2_processor().image_mean)
    picture = torch.from_numpy(dense_sets.room(1000)[0]).float().mean(dim=(0, 1)) / 255
    shown = nyu[0]["pixel_values"].mean(dim=(1, 2)) * torch.tensor(dinov2_processor().image_std) + mean
    torch.testing.assert_close(shown, picture, atol=0.02, rtol=0)  # rescaled and normalised once


def test_jitter_changes_colours_and_not_places():
    rng = np.random.default_rng(0)
    picture = Image.fromarray(dense_sets.room(0)[0])
    grey = Image.new("RGB", (4, 4), (120, 120, 120))
    values = [np.asarray(jitter(grey, rng)).astype(int) for _ in range(40)]
    assert all(np.ptp(value) <= 2 for value in values)  # grey has no hue
    means = [value.mean() for value in values]
    assert 90 < min(means) < 110 < 130 < max(means) < 150
    changed = np.asarray(jitter(picture, rng)).astype(float)
    _, colour = np.unique(np.asarray(picture).reshape(-1, 3), axis=0, return_inverse=True)
    flat = changed.reshape(-1, 3)
    for number in range(colour.max() + 1):  # what had one colour has one
        assert np.ptp(flat[colour.ravel() == number], axis=0).max() == 0
    assert np.abs(changed - np.asarray(picture)).mean() > 3


@pytest.mark.parametrize(
    "options", [{"augment": "mixup"}, {"scale": (0.0, 1.0)}, {"scale": (0.8, 0.5)}, {"scale": (0.5, 3.0)}]
)
def test_wrong_options_are_named(options):
    with pytest.raises(ValueError, match=r"use augment none, crop_flip, crop_flip_jitter and 0 < scale"):
        DensePixels(Coordinates(), Plain(), Frame((28, 28), 14), **options)
