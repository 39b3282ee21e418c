"""Small twins of ADE20K and NYU Depth v2 in the layouts they are spread in, for tests and for trials offline.

    python tests/dense_sets.py FOLDER

The depths are exact: a textured room is seen from inside, and every pixel's ray meets a wall, the floor, the ceiling or
a box on the floor at a distance that is computed and not drawn.
"""

import csv
import sys
from pathlib import Path

import numpy as np
from PIL import Image

FOCAL = 1.1  # focal length in picture widths


def room(seed, height=48, width=64):
    """A picture, uint8 `(height, width, 3)`, and the depth along the camera's axis in metres, float64, of one room."""
    rng = np.random.default_rng(seed)
    left, right, top, bottom = -rng.uniform(1, 2), rng.uniform(1, 2), -rng.uniform(0.8, 1.2), rng.uniform(0.8, 1.2)
    back, box = rng.uniform(3, 6), rng.uniform(1.5, 2.8)
    columns, rows = np.meshgrid(np.arange(width) - (width - 1) / 2, np.arange(height) - (height - 1) / 2)
    x, y = columns / (FOCAL * width), rows / (FOCAL * width)  # a point at depth z is (x z, y z, z)
    with np.errstate(divide="ignore"):
        planes = np.stack([np.where(x < 0, left / x, right / x), np.where(y < 0, top / y, bottom / y)])
    depth = np.minimum(planes.min(axis=0), back)
    front = (np.abs(x * box) < 0.4) & (y * box > bottom - 0.6) & (y * box < bottom) & (box < depth)
    depth = np.where(front, box, depth)
    surface = np.select([front, depth == back, depth == planes[1]], [0, 1, 2], 3)
    colours = rng.uniform(60, 220, (4, 3))[surface]
    squares = (np.floor(3 * x * depth) + np.floor(3 * y * depth) + np.floor(3 * depth)) % 2
    shade = (0.75 + 0.25 * squares) / (1 + 0.15 * depth)
    return np.rint(colours * shade[..., None]).clip(0, 255).astype(np.uint8), depth


def scene(seed, height=45, width=60):
    """A picture, uint8 `(height, width, 3)`, and its mask, uint8 `(height, width)`: 0 for nothing, classes from 1."""
    rng = np.random.default_rng(seed)
    mask = np.where(np.arange(height)[:, None] < height // 2, 3, 7).repeat(width, axis=1).astype(np.uint8)
    for number in (1, 12, 150):
        row, column = rng.integers(0, height - 12), rng.integers(0, width - 12)
        mask[row : row + 12, column : column + 12] = number
    mask[:2] = 0
    colours = np.random.default_rng(0).uniform(0, 220, (151, 3))  # of a class, in every picture
    noise = rng.normal(0, 12, (height, width, 3))
    return (colours[mask] + noise).clip(0, 255).astype(np.uint8), mask


def make_ade(folder, train=4, validation=2):
    """`ADEChallengeData2016`: JPEG images and PNG masks; returns its path."""
    root = Path(folder) / "ADEChallengeData2016"
    for split, count, name in (("training", train, "train"), ("validation", validation, "val")):
        for part in ("images", "annotations"):
            (root / part / split).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            picture, mask = scene(index + 1000 * (split == "validation"))
            stem = f"ADE_{name}_{index + 1:08d}"
            Image.fromarray(picture).save(root / "images" / split / f"{stem}.jpg", quality=95)
            Image.fromarray(mask).save(root / "annotations" / split / f"{stem}.png")
    return root


def make_nyu_csv(folder, train=4, test=2, size=(48, 64)):
    """The csv and png layout: training depths in 8 bits, test depths in millimetres; returns its path."""
    folder = Path(folder)
    for split, count in (("train", train), ("test", test)):
        (folder / "data" / f"nyu2_{split}").mkdir(parents=True, exist_ok=True)
        rows = []
        for index in range(count):
            picture, depth = room(index + 1000 * (split == "test"), *size)
            image, label = (f"data/nyu2_{split}/{index:05d}_{name}" for name in ("colors.jpg", "depth.png"))
            Image.fromarray(picture).save(folder / image, quality=95)
            stored = depth / 10 * 255 if split == "train" else depth * 1000
            dtype = np.uint8 if split == "train" else np.uint16
            Image.fromarray(np.rint(stored).astype(dtype)).save(folder / label)
            rows.append((image, label))
        with open(folder / "data" / f"nyu2_{split}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
    return folder


def make_nyu_h5(folder, train=3, test=2):
    """Files of `rgb (3, height, width)` and `depth (height, width)` in `train/` and `val/`; returns its path."""
    import h5py

    for split, place, count in (("train", "train/kitchen_1", train), ("val", "val/official", test)):
        (Path(folder) / place).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            picture, depth = room(index + 1000 * (split == "val"))
            with h5py.File(Path(folder) / place / f"{index:05d}.h5", "w") as file:
                file["rgb"], file["depth"] = picture.transpose(2, 0, 1), depth.astype(np.float32)
    return Path(folder)


def make_nyu_mat(folder, count=5):
    """`nyu_depth_v2_labeled.mat`, axes as MATLAB writes them, with `splits.mat`; returns its path."""
    import h5py
    from scipy.io import savemat

    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / "nyu_depth_v2_labeled.mat"
    pictures, depths = zip(*(room(index) for index in range(count)), strict=True)
    with h5py.File(path, "w") as file:
        file["images"] = np.stack([picture.transpose(2, 1, 0) for picture in pictures])
        file["depths"] = np.stack([depth.T for depth in depths]).astype(np.float32)
    numbers = np.arange(1, count + 1)[:, None]
    savemat(path.with_name("splits.mat"), {"trainNdxs": numbers[: count - 2], "testNdxs": numbers[count - 2 :]})
    return path


if __name__ == "__main__":
    root = Path(sys.argv[1])
    made = (
        make_ade(root, 40, 20),
        make_nyu_csv(root / "nyu", 40, 20, (480, 640)),
        make_nyu_h5(root / "nyu_h5", 40, 20),
    )
    sys.stdout.write("\n".join(map(str, made)) + "\n")
