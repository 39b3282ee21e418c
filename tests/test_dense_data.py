"""Pairs of image and label out of every layout: exact numbers, one frame, and mistakes that are named."""

import builtins
import pickle

import datasets
import numpy as np
import pytest
from PIL import Image

import dense_sets
from raptor_hf.dense_data import (
    IGNORE_INDEX,
    DenseDataset,
    UnreadableError,
    load_depth,
    load_segmentation,
    read_depth,
)


@pytest.fixture
def ade(tmp_path):
    return dense_sets.make_ade(tmp_path)


@pytest.fixture
def nyu(tmp_path):
    return dense_sets.make_nyu_csv(tmp_path / "nyu")


def reduced(mask):
    """What a mask of the files means, written down once more."""
    return np.where(mask == 0, 255, mask.astype(int) - 1)


def save_turned(picture, path):
    """Saves a picture so that a viewer turns it by a quarter (EXIF orientation 6)."""
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(path, exif=exif, quality=95)


# ---- Segmentation ----


@pytest.mark.parametrize(
    ("split", "count", "first"), [("train", 4, 0), ("validation", 2, 1000), ("test", 2, 1000), ("training", 4, 0)]
)
def test_masks_are_reduced_once_and_images_are_not(split, count, first, ade):
    loaded = load_segmentation(ade, split)
    assert (len(loaded), loaded.name) == (count, "ADEChallengeData2016")
    for index in range(count):
        picture, mask = dense_sets.scene(first + index)
        item = loaded[index]
        assert item["label"].dtype == np.uint8
        np.testing.assert_array_equal(item["label"], reduced(mask))
        assert {255, 0, 149} <= set(item["label"].ravel().tolist())  # nothing, the first class and the last
        assert np.abs(np.asarray(item["image"]).astype(int) - picture).mean() < 12  # JPEG
    assert [len(load_segmentation(str(ade.parent), split)), loaded[-1]["label"].shape] == [count, (45, 60)]
    with pytest.raises(IndexError):
        loaded[count]


def test_classes_are_named_where_their_table_is(ade):
    assert load_segmentation(ade).label_names is None
    rows = ["Idx\tRatio\tTrain\tVal\tName", "1\t0.16\t11664\t1172\twall", "3\t0.1\t8366\t823\tsky, heaven; blue"]
    (ade / "objectInfo150.txt").write_text("\n".join(rows))
    names = load_segmentation(ade).label_names
    assert len(names) == 150
    assert names[:4] == ["wall", "class 2", "sky", "class 4"]


def test_an_image_of_zeros_stays_one(ade):
    Image.new("RGB", (60, 45)).save(ade / "images" / "training" / "ADE_train_00000001.jpg")
    assert np.asarray(load_segmentation(ade, "train")[0]["image"]).max() == 0


def test_masks_that_are_none(ade):
    mask = ade / "annotations" / "training" / "ADE_train_00000001.png"
    Image.fromarray(np.full((45, 60), 151, np.uint8)).save(mask)
    with pytest.raises(ValueError, match=r"mask .*ADE_train_00000001.png holds 151, SceneParse150 has 0 .. 150"):
        load_segmentation(ade, "train")[0]
    Image.new("RGB", (60, 45)).save(mask)
    with pytest.raises(ValueError, match=r"ADE_train_00000001.png is a picture of mode RGB.*the full ADE20K"):
        load_segmentation(ade, "train")[0]
    Image.fromarray(np.zeros((44, 60), np.uint8)).save(mask)
    with pytest.raises(ValueError, match=r"has 60 x 45 pixels, its label .*ADE_train_00000001.png 60 x 44"):
        load_segmentation(ade, "train")[0]
    mask.write_bytes(mask.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"mask .*ADE_train_00000001.png cannot be read"):
        load_segmentation(ade, "train")[0]
    mask.unlink()
    with pytest.raises(ValueError, match=r"1 of 4 images in .* have no mask in .*ADE_train_00000001.jpg"):
        load_segmentation(ade, "train")


def test_folders_that_are_not_sceneparse150(ade, tmp_path):
    with pytest.raises(ValueError, match=r"split='extra' of ADEChallengeData2016; use one of train, training"):
        load_segmentation(ade, "extra")
    (tmp_path / "index_ade20k.pkl").touch()
    with pytest.raises(ValueError, match=r"is the full ADE20K with its 3,000 classes; the probe takes SceneParse150"):
        load_segmentation(_moved(ade, tmp_path))
    other = tmp_path / "other"
    (other / "images" / "validation").mkdir(parents=True)
    (other / "scene_parse_150.py").touch()
    with pytest.raises(ValueError, match=r"is not laid out as ADEChallengeData2016.*scene_parse_150.py is not run"):
        load_segmentation(other)
    with pytest.raises(ValueError, match=r"folder .*missing does not exist"):
        load_segmentation(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"'nobody/nothing' is no folder here and did not load from the Hub"):
        load_segmentation("nobody/nothing")


def _moved(ade, tmp_path):
    """A folder that holds the index of the full ADE20K and no ADEChallengeData2016."""
    ade.rename(tmp_path / "renamed")
    return tmp_path


@pytest.mark.parametrize("column", ["annotation", "mask"])
def test_parquet_masks_are_those_of_the_folder(column, ade, tmp_path):
    paths = {part: sorted((ade / part / "validation").iterdir()) for part in ("images", "annotations")}
    table = {"image": [str(path) for path in paths["images"]], column: [str(path) for path in paths["annotations"]]}
    features = datasets.Features({"image": datasets.Image(), column: datasets.Image()})
    rows = datasets.Dataset.from_dict(table, features=features)
    rows.to_parquet(tmp_path / "rows.parquet")
    rows = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    from_rows, from_folder = load_segmentation(rows), load_segmentation(ade)
    assert len(from_rows) == 2
    for index in range(2):
        np.testing.assert_array_equal(from_rows[index]["label"], from_folder[index]["label"])
        np.testing.assert_array_equal(from_rows[index]["image"], from_folder[index]["image"])
    with pytest.raises(ValueError, match=r"has no label column among annotation, .*, only image; rename it"):
        load_segmentation(rows.remove_columns(column))


# ---- Depth ----


def test_test_depths_are_millimetres(nyu):
    loaded = load_depth(nyu, "test")
    assert len(loaded) == 2
    for index in range(2):
        picture, depth = dense_sets.room(1000 + index)
        label = loaded[index]["label"]
        assert label.dtype == np.float32
        assert np.abs(label - depth).max() <= 0.00051
        assert np.abs(np.asarray(loaded[index]["image"]).astype(int) - picture).mean() < 12


def test_training_depths_are_shares_of_ten_metres(nyu):
    loaded = load_depth(nyu / "data", "train")  # the folder of the csv itself
    assert len(loaded) == 4
    for index in range(4):
        assert np.abs(loaded[index]["label"] - dense_sets.room(index)[1]).max() <= 10 / 255 / 2 + 1e-6


@pytest.mark.parametrize("make", [dense_sets.make_nyu_h5, dense_sets.make_nyu_mat])
def test_float_layouts_are_exact(make, tmp_path):
    source = make(tmp_path / "set")
    seeds = [1000, 1001] if make is dense_sets.make_nyu_h5 else [3, 4]
    loaded = load_depth(source, "test")
    assert len(loaded) == 2
    for index, seed in enumerate(seeds):
        picture, depth = dense_sets.room(seed)
        np.testing.assert_array_equal(loaded[index]["label"], depth.astype(np.float32))
        np.testing.assert_array_equal(loaded[index]["image"], picture)
    assert len(load_depth(source, "train")) == 3
    again = pickle.loads(pickle.dumps(loaded))  # what a worker gets
    np.testing.assert_array_equal(again[1]["label"], loaded[1]["label"])


def test_the_room_is_seen_as_it_is():
    _, depth = dense_sets.room(0)
    columns = np.arange(64) - 31.5
    wall = depth[24, :8] * columns[:8] / (1.1 * 64)  # the left wall is a plane: x is the same all along
    assert wall.std() < 1e-12
    assert depth.max() == pytest.approx(depth[24, 31], abs=3)
    assert 1 < depth.min() < depth.max() < 10


def test_sixteen_bits_are_read_exactly(tmp_path):
    values = np.array([[0, 1, 255, 256, 1000, 9999]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "depth.png")
    expected = np.array([[0, 0.001, 0.255, 0.256, 1.0, 9.999]], dtype=np.float32)
    np.testing.assert_array_equal(read_depth(tmp_path / "depth.png", "depth.png"), expected)
    np.testing.assert_array_equal(read_depth((tmp_path / "depth.png").read_bytes(), "depth.png"), expected)
    floats = np.array([[0, -1, np.nan, np.inf, 2.5]], dtype=np.float32)
    for value in (Image.fromarray(floats), floats, floats.astype(np.float64).tolist()):
        np.testing.assert_array_equal(read_depth(value, "d"), np.array([[0, 0, 0, 0, 2.5]], dtype=np.float32))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Image.new("L", (2, 2)), "depth d is a picture of mode L: 8 bits cannot hold a depth. Give millimetres"),
        (Image.new("RGB", (2, 2)), "depth d is a picture of mode RGB"),
        (np.zeros((2, 2), np.int32), r"depth d is an array of int32 \(2, 2\); give \(height, width\) in metres"),
        (np.zeros((1, 2, 2)), r"depth d is an array of float64 \(1, 2, 2\)"),
        (b"no picture", "depth d cannot be read"),
    ],
)
def test_what_is_no_depth(value, message):
    with pytest.raises(ValueError, match=message):
        read_depth(value, "d")


def test_eight_bits_are_for_the_training_table_alone(nyu):
    table = nyu / "data" / "nyu2_test.csv"
    table.write_text((nyu / "data" / "nyu2_train.csv").read_text())
    with pytest.raises(ValueError, match=r"depth .*00000_depth.png is a picture of mode L: 8 bits"):
        load_depth(nyu, "test")[0]


def test_tables_and_folders_that_are_not_nyu(nyu, tmp_path):
    table = nyu / "data" / "nyu2_test.csv"
    rows = table.read_text()
    table.write_text("image,depth\n" + rows)  # a header does no harm
    assert len(load_depth(nyu)) == 2
    table.write_text(rows + "data/nyu2_test/9.jpg,data/nyu2_test/9.png\n")
    with pytest.raises(ValueError, match=r"nyu2_test.csv names 2 files that are not there, the first is .*9.jpg"):
        load_depth(nyu)
    for content in ("", "a.jpg\n"):
        table.write_text(content)
        with pytest.raises(ValueError, match="must name an image and a depth in each row"):
            load_depth(nyu)
    with pytest.raises(ValueError, match="split='extra' of NYU Depth v2; use one of train, test"):
        load_depth(nyu, "extra")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not laid out as NYU Depth v2: nyu2_test.csv, or h5 files in val/"):
        load_depth(tmp_path / "empty")
    path = dense_sets.make_nyu_mat(tmp_path / "mat")
    path.with_name("splits.mat").unlink()
    with pytest.raises(ValueError, match=r"splits.mat does not exist; the official split is in splits.mat"):
        load_depth(path)
    with pytest.raises(ValueError, match=r"nowhere.mat does not exist; check the path"):
        load_depth(tmp_path / "nowhere.mat")


def test_a_missing_extra_is_one_line(tmp_path, monkeypatch):
    source, found = dense_sets.make_nyu_h5(tmp_path), builtins.__import__

    def without(name, *args):
        if name == "h5py":
            raise ImportError(name)
        return found(name, *args)

    loaded = load_depth(source)
    monkeypatch.delitem(__import__("sys").modules, "h5py")
    monkeypatch.setattr("importlib.import_module", lambda name: without(name))
    with pytest.raises(ImportError, match=r"h5py is needed for this layout; install it with: pip install"):
        loaded[0]


def test_depth_columns_in_millimetres_and_in_metres(nyu):
    paths = sorted((nyu / "data" / "nyu2_test").iterdir())
    images, depths = [str(path) for path in paths[::2]], [str(path) for path in paths[1::2]]
    features = datasets.Features({"image": datasets.Image(), "depth_map": datasets.Image()})
    rows = datasets.Dataset.from_dict({"image": images, "depth_map": depths}, features=features)
    from_rows, from_folder = load_depth(rows), load_depth(nyu)
    np.testing.assert_array_equal(from_rows[1]["label"], from_folder[1]["label"])
    assert np.abs(load_depth(datasets.DatasetDict({"validation": rows}), "validation")[0]["label"]).max() > 1


# ---- One frame ----


@pytest.mark.parametrize("task", ["segmentation", "depth"])
def test_a_turned_image_and_its_label_share_a_frame(task, ade, nyu):
    if task == "segmentation":
        image, label = (sorted((ade / part / "validation").iterdir())[0] for part in ("images", "annotations"))
        load = lambda: load_segmentation(ade)[0]  # noqa: E731
    else:
        image, label = sorted((nyu / "data" / "nyu2_test").iterdir())[:2]
        load = lambda: load_depth(nyu)[0]  # noqa: E731
    before, stored = load(), Image.open(image).copy()
    save_turned(stored, image)
    both = load()  # a label of the stored size is turned with its image
    np.testing.assert_array_equal(both["label"], np.rot90(before["label"], -1))
    assert both["image"].size == stored.size[::-1]
    turned = np.asarray(both["image"]).astype(int) - np.rot90(np.asarray(stored), -1)
    assert np.abs(turned).mean() < 6
    picture = Image.open(label)
    picture.transpose(Image.Transpose.ROTATE_270).save(label)
    upright = load()  # a label of the upright size is right as it is
    np.testing.assert_array_equal(upright["label"], both["label"])
    picture.resize((7, 5), Image.Resampling.NEAREST).save(label)
    with pytest.raises(ValueError, match=r"a label must have its image's size"):
        load()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_broken_metadata_do_no_harm_and_damage_is_named(ade):
    path = sorted((ade / "images" / "validation").iterdir())[0]
    before = load_segmentation(ade)[0]
    content = path.read_bytes()
    path.write_bytes(content[:2] + b"\xff\xe1\x00\x10Exif\x00\x00II*\x00\xff\xff\xff\xff" + content[2:])
    np.testing.assert_array_equal(load_segmentation(ade)[0]["image"], before["image"])
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"image .*ADE_val_00000001.jpg cannot be read"):
        load_segmentation(ade)[0]


def test_pairs_must_be_complete():
    with pytest.raises(ValueError, match="set: 2 images and 1 labels; every image needs one"):
        DenseDataset([1, 2], [1], read_depth, "set")
    assert IGNORE_INDEX == 255


@pytest.mark.parametrize("part", ["images", "annotations"])
def test_damaged_pairs_are_left_out_and_counted(part, ade, caplog):
    path = sorted((ade / part / "training").iterdir())[1]
    path.write_bytes(path.read_bytes()[:60])
    pairs = load_segmentation(ade, "train")
    with pytest.raises(UnreadableError, match=rf"{path.name} cannot be read: .*--on-error skip"):
        pairs[1]
    kept = pairs.without_damaged()
    assert (len(pairs), pairs.num_skipped, len(kept), kept.num_skipped) == (4, 0, 3, 1)
    assert path.name in caplog.text
    for own, index in enumerate((0, 2, 3)):
        np.testing.assert_array_equal(kept[own]["label"], pairs[index]["label"])
    assert kept.select([0]).without_damaged().num_skipped == 1
    with pytest.raises(ValueError, match=r"none of the 1 pairs of ADEChallengeData2016 can be read"):
        pairs.select([1]).without_damaged()


def test_only_damage_is_left_out(ade):
    mask = ade / "annotations" / "training" / "ADE_train_00000001.png"
    Image.fromarray(np.full((45, 60), 151, np.uint8)).save(mask)
    with pytest.raises(ValueError, match="holds 151, SceneParse150 has"):
        load_segmentation(ade, "train").without_damaged()


def test_damaged_files_of_arrays_are_named(tmp_path):
    root = dense_sets.make_nyu_h5(tmp_path, train=3)
    path = sorted((root / "train").rglob("*.h5"))[0]
    path.write_bytes(path.read_bytes()[:100])
    pairs = load_depth(root, "train")
    with pytest.raises(UnreadableError, match=rf"{path.name} cannot be read"):
        pairs[0]
    assert (len(pairs.without_damaged()), pairs.without_damaged().num_skipped) == (2, 1)
