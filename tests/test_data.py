"""Every source and file kind must give the same upright RGB pixels, and augmentation must depend on its key alone."""

import copy
import io
import logging
import random
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from transformers import AutoImageProcessor, BitImageProcessorPil, DeiTImageProcessorPil, ViTImageProcessorPil

from raptor_hf.data import (
    ImageDataset,
    PixelDataset,
    collate_pixels,
    dinov2_processor,
    load_images,
    processor_at_size,
    random_crop_box,
    to_rgb,
)


def noise(height=20, width=30, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def pixels_of(image):
    return np.asarray(image).astype(int)


def write(path, image, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def make_folder(root, classes=("ant", "bee"), per_class=2, splits=("",)):
    for split in splits:
        for number, label in enumerate(classes):
            for index in range(per_class):
                write(root / split / label / f"{index}.png", noise(seed=10 * number + index))
    return root


def damage(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    noise(80, 90).save(buffer, "JPEG")
    path.write_bytes(buffer.getvalue()[: buffer.tell() // 2])
    return path


# ------------------------------------------------------------------------------------------------------- image modes


def palette_image(transparency=None):
    image = Image.new("P", (30, 20), 1)
    image.putpalette([0, 0, 0, 200, 10, 20])
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def keyed(mode, colour):
    image = Image.new(mode, (30, 20), colour)
    image.info["transparency"] = colour
    return image


# name: (file, image, the colour of every pixel after conversion, how far it may be off)
MODES = {
    "1": ("x.png", Image.new("1", (30, 20), 1), (255, 255, 255), 0),
    "L": ("x.png", Image.new("L", (30, 20), 77), (77, 77, 77), 0),
    "L_key": ("x.png", keyed("L", 77), (255, 255, 255), 0),
    "LA_half": ("x.png", Image.new("LA", (30, 20), (0, 51)), (204, 204, 204), 0),
    "P": ("x.png", palette_image(), (200, 10, 20), 0),
    "P_clear": ("x.png", palette_image(1), (255, 255, 255), 0),
    "P_alpha": ("x.png", palette_image(b"\xff\x33"), (244, 206, 208), 0),
    "RGB": ("x.png", Image.new("RGB", (30, 20), (1, 2, 3)), (1, 2, 3), 0),
    "RGB_key": ("x.png", keyed("RGB", (1, 2, 3)), (255, 255, 255), 0),
    "RGBA_clear": ("x.png", Image.new("RGBA", (30, 20), (200, 10, 20, 0)), (255, 255, 255), 0),
    "RGBA_half": ("x.png", Image.new("RGBA", (30, 20), (200, 0, 255, 51)), (244, 204, 255), 0),
    "CMYK_adobe": ("x.jpg", Image.new("CMYK", (30, 20), (0, 255, 255, 0)), (255, 0, 0), 3),
    "CMYK_tiff": ("x.tif", Image.new("CMYK", (30, 20), (255, 0, 0, 51)), (0, 204, 204), 1),
    "I;16": ("x.png", Image.new("I;16", (30, 20), 32896), (128, 128, 128), 0),
    "I;16_dark": ("x.tif", Image.new("I;16", (30, 20), 514), (2, 2, 2), 0),
    "I;16_key": ("x.png", keyed("I;16", 514), (255, 255, 255), 0),
    "I": ("x.tif", Image.new("I", (30, 20), 70000), (255, 255, 255), 0),
    "F_unit": ("x.tif", Image.new("F", (30, 20), 0.5), (128, 128, 128), 0),
    "F_255": ("x.tif", Image.new("F", (30, 20), 128.0), (128, 128, 128), 0),
}


def as_folder(path):
    return path.parent


def as_datasets(path):
    rows = datasets.Dataset.from_dict({"image": [str(path)]})
    return rows.cast_column("image", datasets.Image())


def as_datasets_bytes(path):
    rows = datasets.Dataset.from_dict({"image": [{"bytes": path.read_bytes(), "path": None}]})
    return rows.cast_column("image", datasets.Image())


def as_mappings(path):
    return [{"image": Image.open(path)}]


def as_images(path):
    return [Image.open(path)]


LOADERS = (as_folder, as_datasets, as_datasets_bytes, as_mappings, as_images)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb_through_every_loader(tmp_path, mode, loader):
    name, image, colour, tolerance = MODES[mode]
    options = {"transparency": image.info["transparency"]} if "transparency" in image.info else {}
    path = write(tmp_path / "one" / name, image, **options)
    loaded = load_images(loader(path))[0]["image"]
    assert (loaded.mode, loaded.size) == ("RGB", (30, 20))
    assert np.abs(pixels_of(loaded) - colour).max() <= tolerance


def test_opaque_rgb_is_returned_as_is_and_big_endian_grey_like_little():
    image = noise()
    assert to_rgb(image) is image
    levels = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    little = Image.frombytes("I;16", (16, 16), levels.astype("<u2").tobytes())
    big = Image.frombytes("I;16B", (16, 16), levels.astype(">u2").tobytes())
    for grey in (little, big):
        assert np.array_equal(pixels_of(to_rgb(grey))[..., 1], np.arange(256).reshape(16, 16))


def test_float_values_that_are_not_numbers_or_out_of_range_stay_in_range():
    image = Image.fromarray(np.array([[np.nan, -5.0, 300.0, 100.0]], dtype=np.float32))
    assert pixels_of(to_rgb(image))[0, :, 0].tolist() == [0, 0, 255, 100]


# ---------------------------------------------------------------------------------------------------------- metadata


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(tmp_path, orientation, loader):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = write(tmp_path / "one" / "x.png", noise(), exif=exif)
    image = load_images(loader(path))[0]["image"]
    expected = ImageOps.exif_transpose(Image.open(path))
    assert image.size == ((30, 20) if orientation < 5 else (20, 30))
    assert np.array_equal(pixels_of(image), pixels_of(expected))
    again = load_images([image])[0]["image"]
    assert np.array_equal(pixels_of(again), pixels_of(expected))


def jpeg(**options):
    buffer = io.BytesIO()
    noise().save(buffer, "JPEG", **options)
    return buffer.getvalue()


def png(info):
    buffer = io.BytesIO()
    noise().save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def raw_exif_chunk():
    info = PngInfo()
    info.add_text("Raw profile type exif", "a\nb\nc\nno hex digits")
    return png(info)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "content",
    [
        jpeg(xmp=b"\xff\xfe\x80<x:xmpmeta>\xf0\xf1"),
        jpeg(exif=b"Exif\0\0no tiff header at all"),
        jpeg(exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05\x01\x12\0\x03"),
        jpeg(exif=b"Exif\0\0II*\0\xff\xff\xff\x7f"),
        raw_exif_chunk(),
    ],
    ids=["xmp", "exif_junk", "exif_truncated", "exif_offset", "png_raw_exif"],
)
def test_broken_metadata_never_stop(tmp_path, content):
    path = tmp_path / "one" / "x.jpg"
    path.parent.mkdir()
    path.write_bytes(content)
    for loader in LOADERS:
        loaded = load_images(loader(path), on_error="skip")
        assert (loaded.num_skipped, loaded[0]["image"].size) == (0, (30, 20))


# ---------------------------------------------------------------------------------------------------- damaged images


def damaged_sources(tmp_path):
    make_folder(tmp_path / "set")
    bad = damage(tmp_path / "set" / "bee" / "0.jpg")
    paths = sorted((tmp_path / "set").rglob("*.*g"))
    labels = [int(path.parent.name == "bee") for path in paths]
    rows = datasets.Dataset.from_dict({"image": list(map(str, paths)), "label": labels})
    rows = rows.cast_column("image", datasets.Image())
    contents = [(path.read_bytes(), label) for path, label in zip(paths, labels, strict=True)]
    return bad, {"folder": tmp_path / "set", "datasets": rows, "pairs": contents, "lazy": Lazy(paths, labels)}


class Lazy:
    """A dataset of others that decodes in its own `__getitem__`."""

    def __init__(self, paths, labels):
        self.paths, self.labels = paths, labels

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with Image.open(self.paths[index]) as image:
            image.load()
        return {"img": image, "label": self.labels[index]}


@pytest.mark.parametrize("kind", ["folder", "datasets", "pairs", "lazy"])
def test_damaged_image_is_named_or_skipped_and_counted(tmp_path, kind, caplog):
    bad, sources = damaged_sources(tmp_path)
    where = str(bad) if kind in ("folder", "datasets") else "row 2 of the source"
    with pytest.raises(ValueError, match=r"image 2 of .* cannot be read: .*on_error='skip'") as raised:
        list(load_images(sources[kind]))
    assert f"({where})" in str(raised.value)
    assert "\n" not in str(raised.value)
    with caplog.at_level(logging.WARNING, logger="raptor_hf.data"):
        kept = load_images(sources[kind], on_error="skip")
    assert (len(kept), kept.num_skipped, kept.labels) == (4, 1, [0, 0, 1, 1])
    assert [item["label"] for item in kept] == kept.labels
    assert where in caplog.text
    assert np.array_equal(pixels_of(kept[2]["image"]), pixels_of(noise(seed=10)))


def test_a_folder_of_damaged_images_has_nothing_to_skip_to(tmp_path):
    damage(tmp_path / "set" / "cat" / "x.jpg")
    (tmp_path / "set" / "cat" / "y.png").write_bytes(b"")
    with pytest.raises(ValueError, match="none of the 2 images of 'set' can be read"):
        load_images(tmp_path / "set", on_error="skip")


def test_indices_end_so_that_iteration_does():
    images = load_images([noise(), noise()])
    assert len(list(images)) == 2
    assert "label" not in images[-1]
    with pytest.raises(IndexError):
        images[2]


# ------------------------------------------------------------------------------------------------------------ digits


def test_digits_have_the_documented_splits():
    train, test, everything = (load_images("digits", split=split) for split in ("train", "test", None))
    assert (len(train), len(test), len(everything)) == (1437, 360, 1797)
    assert train.label_names == [str(digit) for digit in range(10)]
    assert (train.name, train[0]["image"].size, train[0]["image"].mode) == ("digits", (8, 8), "RGB")
    shares = [np.bincount(part.labels) / len(part) for part in (train, test)]
    assert np.abs(shares[0] - shares[1]).max() < 0.005
    rows = [{item["image"].tobytes() for item in part} for part in (train, test, everything)]
    assert rows[0] | rows[1] == rows[2]
    levels = {value for item in everything.select(range(50)) for value in pixels_of(item["image"]).flat}
    assert levels <= {round(255 * level / 16) for level in range(17)}
    assert {0, 255} <= levels


def test_digits_errors_name_the_remedy(monkeypatch):
    with pytest.raises(ValueError, match="split='val' of 'digits' does not exist; use 'train' or 'test'"):
        load_images("digits", split="val")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match=r'pip install "raptor_hf\[analysis\]"'):
        load_images("digits")


# ----------------------------------------------------------------------------------------------------------- folders


def test_class_folders_are_sorted_classes_and_files(tmp_path):
    root = make_folder(tmp_path / "insects", classes=("wasp", "Ant", "bee"))
    write(root / "bee" / "deep" / "z.JPEG", noise())
    write(root / "bee" / "._0.png", noise(), format="PNG")
    (root / "bee" / "notes.txt").write_text("no image")
    (root / "empty").mkdir()
    images = load_images(str(root))
    assert images.label_names == ["Ant", "bee", "wasp"]
    assert images.labels == [0, 0, 1, 1, 1, 2, 2]
    assert images.name == "insects"
    assert [item["label"] for item in images] == images.labels
    assert np.array_equal(pixels_of(images[1]["image"]), pixels_of(noise(seed=11)))


def test_flat_folder_has_no_labels(tmp_path):
    for name in ("b.png", "a.png"):
        write(tmp_path / "photos" / name, noise(seed=ord(name[0])))
    images = load_images(tmp_path / "photos", split="train")
    assert (images.labels, images.label_names) == (None, None)
    assert list(images[0]) == ["image"]
    assert np.array_equal(pixels_of(images[0]["image"]), pixels_of(noise(seed=ord("a"))))


@pytest.mark.parametrize("held_out", ["test", "validation", "val", "Val"])
def test_splits_share_their_class_numbers(tmp_path, held_out):
    root = make_folder(tmp_path / "set", classes=("ant", "bee", "fly"), splits=("train",))
    make_folder(root, classes=("fly",), per_class=1, splits=(held_out,))
    train, test = load_images(root, split="train"), load_images(root, split="test")
    assert train.labels == [0, 0, 1, 1, 2, 2]
    assert (test.labels, test.label_names, test.name) == ([2], ["ant", "bee", "fly"], "set")


def test_test_folder_is_preferred_to_validation_folder(tmp_path):
    root = make_folder(tmp_path / "set", splits=("train", "val"))
    make_folder(root, per_class=1, splits=("test",))
    assert [len(load_images(root, split=split)) for split in ("test", "validation", "train")] == [2, 4, 4]


def test_missing_or_ambiguous_split_of_a_folder(tmp_path):
    both, plain = make_folder(tmp_path / "both", splits=("train", "val")), make_folder(tmp_path / "plain")
    with pytest.raises(ValueError, match="split=None of 'both' does not exist; choose one of: train, val"):
        load_images(both)
    with pytest.raises(ValueError, match="split='dev' of 'both' does not exist; choose one of: train, val"):
        load_images(both, split="dev")
    with pytest.raises(ValueError, match="folder 'plain' has no split 'test': put its images into train/ and test/"):
        load_images(plain, split="test")
    assert len(load_images(plain, split="train")) == 4
    assert len(load_images(make_folder(tmp_path / "only", splits=("train",)))) == 4


def test_a_class_named_train_is_a_class_and_other_folders_no_split(tmp_path):
    vehicles = make_folder(tmp_path / "vehicles", classes=("bus", "car", "train"))
    assert load_images(vehicles, split="train").label_names == ["bus", "car", "train"]
    root = make_folder(tmp_path / "set", splits=("train", "test"))
    write(root / "figures" / "plot.png", noise())
    assert load_images(root, split="train").label_names == ["ant", "bee"]


def test_images_beside_class_folders_are_left_out_aloud(tmp_path, caplog):
    root = make_folder(tmp_path / "set")
    write(root / "preview.png", noise())
    with caplog.at_level(logging.WARNING, logger="raptor_hf.data"):
        assert len(load_images(root)) == 4
    assert "1 images of 'set' lie in no class folder" in caplog.text


def test_name_is_the_folder_s_own_also_for_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(make_folder(tmp_path / "set"))
    images = load_images(".")
    assert (images.name, images.labels) == ("set", [0, 0, 1, 1])


def test_sources_that_are_no_image_folder(tmp_path):
    with pytest.raises(ValueError, match=r"folder \./nowhere does not exist; check the path"):
        load_images("./nowhere")
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_images(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no image; put one sub-folder of images per class there"):
        load_images(tmp_path)
    (tmp_path / "imagenet.py").write_text("import datasets")
    with pytest.raises(ValueError, match=r"holds no image, and its script imagenet.py is not run \(as datasets >= 4\)"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match=r"imagenet.py is a file; pass the folder"):
        load_images(tmp_path / "imagenet.py")


# ------------------------------------------------------------------------------------- the Hub and datasets in memory


def rows(**columns):
    count = len(next(iter(columns.values()), [0, 1, 2]))
    return datasets.Dataset.from_dict({"image": [noise(seed=index) for index in range(count)], **columns})


def test_class_label_columns_give_names():
    table = rows(label=[0, 1, 1]).cast_column("label", datasets.ClassLabel(names=["ant", "bee"]))
    images = load_images(table)
    assert (images.labels, images.label_names) == ([0, 1, 1], ["ant", "bee"])
    assert load_images(table.select([2, 0])).labels == [1, 0]
    assert np.array_equal(pixels_of(images[2]["image"]), pixels_of(noise(seed=2)))


@pytest.mark.parametrize("column", ["label", "labels", "fine_label"])
def test_columns_are_found_by_name(column):
    table = rows(**{column: [3, 1, 0], "other": [7, 7, 7]}).rename_column("image", "img")
    images = load_images(table)
    assert (images.labels, images.label_names) == ([3, 1, 0], None)


def test_columns_can_be_named_and_string_labels_are_sorted():
    table = rows(species=["wasp", "ant", "wasp"], label=[0, 0, 0]).rename_column("image", "photo")
    images = load_images(table, image_column="photo", label_column="species")
    assert (images.labels, images.label_names) == ([1, 0, 1], ["ant", "wasp"])


def test_missing_columns_are_errors_that_list_the_others():
    table = rows(species=[0, 1, 2]).rename_column("image", "photo")
    with pytest.raises(ValueError, match="image_column=None is no column; choose one of: photo, species"):
        load_images(table)
    with pytest.raises(ValueError, match="label_column='kind' is no column; choose one of: photo, species"):
        load_images(table, image_column="photo", label_column="kind")
    with pytest.raises(ValueError, match="image_column='x' is no column; choose one of: image"):
        load_images([{"image": noise()}], image_column="x")


def test_a_format_or_transform_of_the_dataset_is_not_used():
    table = rows(label=[0, 1, 1]).with_format("torch")
    assert load_images(table)[1]["label"] == 1
    table.set_transform(lambda batch: {"nothing": batch["label"]})
    assert load_images(table)[0]["image"].size == (30, 20)


def test_labels_that_cannot_be_classes():
    with pytest.raises(ValueError, match="are neither integers nor class names; name the right label_column"):
        load_images(rows(label=[0.5, 1.0, 2.0]))
    with pytest.raises(ValueError, match="are neither integers nor class names"):
        load_images(rows(labels=[[0], [1], [2]]))
    with pytest.raises(ValueError, match="run from -1 to 2; expected 0-based class numbers"):
        load_images(rows(label=[0, -1, 2]))
    with pytest.raises(ValueError, match=r"image 1 of .* has no label; drop the row"):
        load_images(rows(label=[0, None, 2]))
    assert load_images(rows(label=[-1, -1, -1])).labels is None


def test_dataset_dicts_and_objects_know_their_split():
    parts = datasets.DatasetDict({"train": rows(label=[0, 1, 1]), "validation": rows(label=[1])})
    assert len(load_images(parts, split="train")) == 3
    assert len(load_images(parts, split="test")) == 1
    with pytest.raises(
        ValueError, match="split=None of 'DatasetDict' does not exist; choose one of: train, validation"
    ):
        load_images(parts)
    with pytest.raises(
        ValueError, match="split='test' cannot be taken from one dataset object; pass that split itself"
    ):
        load_images(parts["train"], split="test")
    with pytest.raises(ValueError, match="holds no image; check its split or filter"):
        load_images(parts["train"].select([]))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([noise()])


@pytest.mark.parametrize("source", [rows().to_iterable_dataset(), Stream(), iter([noise()])])
def test_streams_say_what_to_do(source):
    with pytest.raises(
        ValueError, match=r"has no length: pass list\(dataset.take\(n\)\), or stream it with load_stream"
    ):
        load_images(source)


def test_pairs_as_torchvision_gives_them():
    pairs = [(noise(seed=index), index % 2) for index in range(3)]
    images = load_images(pairs)
    assert images.labels == [0, 1, 0]
    assert np.array_equal(pixels_of(images[1]["image"]), pixels_of(pairs[1][0]))


def test_hub_id_is_loaded_by_datasets(monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.DatasetDict({"train": rows(label=[0, 1])})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    images = load_images("org/set", revision="v1")
    assert calls == [(("org/set",), {"split": None, "revision": "v1"})]
    assert (images.name, images.labels) == ("org/set", [0, 1])
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows(label=[1]))
    assert load_images("cifar10", split="test").labels == [1]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Dataset scripts are no longer supported, but found set.py"),
        ConnectionError("Couldn't reach 'org/set'\non the Hub"),
        ValueError("Unknown split \"test\". Should be one of ['train']"),
        datasets.exceptions.DatasetGenerationError("broken"),
    ],
    ids=["script", "network", "split", "generation"],
)
def test_hub_failures_are_one_line_with_the_cause(monkeypatch, error):
    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="'org/set' is no folder here and did not load from the Hub") as raised:
        load_images("org/set", split="test")
    assert "\n" not in str(raised.value)
    assert str(error).split()[0] in str(raised.value)
    assert "pass a folder of images" in str(raised.value)


# ----------------------------------------------------------------------------------------------------------- subsets


def test_max_images_is_a_seeded_subset_in_order(tmp_path):
    root = make_folder(tmp_path / "set", per_class=10)
    index = {item["image"].tobytes(): number for number, item in enumerate(load_images(root))}

    def subset(**options):
        return [index[item["image"].tobytes()] for item in load_images(root, **options)]

    five = subset(max_images=5)
    assert five == sorted(five) == subset(max_images=5)
    assert len(set(five)) == 5
    assert five != subset(max_images=5, seed=1)
    assert set(five) < set(subset(max_images=9))
    assert subset(max_images=99) == list(range(20))
    labels = load_images(root, max_images=5).labels
    assert labels == [int(number >= 10) for number in five]


def test_options_are_checked():
    with pytest.raises(ValueError, match="on_error='ignore' is unknown; use 'raise' or 'skip'"):
        load_images("digits", on_error="ignore")
    with pytest.raises(ValueError, match="max_images=0 must be at least 1"):
        load_images("digits", max_images=0)


# -------------------------------------------------------------------------------------------------------- processors


def normalised(image, mean, std):
    values = (np.asarray(image, dtype=np.float64) / 255 - mean) / std
    return torch.from_numpy(values.transpose(2, 0, 1))


DINOV2_MEAN, DINOV2_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def test_dinov2_processor_at_98_equals_pillow_by_hand():
    image = noise(200, 300)
    item = PixelDataset(load_images([(image, 4)]), dinov2_processor(), image_size=98)[0]
    by_hand = image.resize((168, 112), Image.Resampling.BICUBIC).crop((35, 7, 133, 105))
    assert item["label"] == 4
    assert item["pixel_values"].dtype == torch.float32
    expected = normalised(by_hand, DINOV2_MEAN, DINOV2_STD)
    torch.testing.assert_close(item["pixel_values"].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("processor", "size", "crop_size"),
    [
        (dinov2_processor(), {"shortest_edge": 112}, {"height": 98, "width": 98}),
        (ViTImageProcessorPil(), {"height": 98, "width": 98}, None),
        (DeiTImageProcessorPil(), {"height": 112, "width": 112}, {"height": 98, "width": 98}),
        (BitImageProcessorPil(do_center_crop=False), {"shortest_edge": 98}, {"height": 98, "width": 98}),
    ],
    ids=["dinov2", "vit", "deit", "no_crop"],
)
def test_size_override_keeps_the_rule(tmp_path, processor, size, crop_size):
    before = copy.deepcopy(processor.to_dict())
    pixels = PixelDataset(load_images([noise(200, 300)]), processor, image_size=98)
    assert (dict(pixels.processor.size), pixels.size) == (size, (98, 98))
    assert not crop_size or dict(pixels.processor.crop_size) == crop_size
    assert processor.to_dict() == before
    pixels.processor.save_pretrained(tmp_path)
    reloaded = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    again = PixelDataset(pixels.images, reloaded)
    assert type(reloaded) is type(processor)
    assert torch.equal(again[0]["pixel_values"], pixels[0]["pixel_values"])


def test_explicit_size_and_override_agree():
    assert dinov2_processor(98).to_dict() == processor_at_size(dinov2_processor(), 98).to_dict()
    assert dict(dinov2_processor(518).size) == {"shortest_edge": 592}


def bordered():
    pixels = np.zeros((200, 300, 3), dtype=np.uint8)
    pixels[:, :20] = pixels[:, -20:] = 255
    return Image.fromarray(pixels)


def test_border_pixels_survive_without_a_crop_and_not_with_one():
    vit, dinov2, stretched = (
        PixelDataset(load_images([bordered()]), processor, image_size=98)[0]["pixel_values"][0]
        for processor in (
            ViTImageProcessorPil(),
            dinov2_processor(),
            BitImageProcessorPil(size={"height": 224, "width": 224}, do_center_crop=False),
        )
    )
    for kept in (vit, stretched):
        assert kept[:, 0].min() == kept.max()
        assert kept[:, -1].min() == kept.max()
    assert dinov2.min() == dinov2.max()


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessorPil(do_resize=False),
        ViTImageProcessorPil(size={"height": 224, "width": 160}),
        BitImageProcessorPil(size={"shortest_edge": 224, "longest_edge": 300}, do_center_crop=False),
        ViTImageProcessorPil(do_pad=True),
        object(),
    ],
)
def test_processors_that_cannot_be_resized_say_so(processor):
    with pytest.raises(
        ValueError, match=r"image_size=98 cannot be set on \w+ \(size=.*give a positive size, or leave it out"
    ):
        processor_at_size(processor, 98)


def test_size_must_be_positive():
    with pytest.raises(ValueError, match="image_size=0 cannot be set on BitImageProcessorPil"):
        dinov2_processor(0)


def test_sizes_follow_the_image_where_the_processor_says_so():
    pixels = PixelDataset(load_images([noise(40, 60), noise(60, 40)]), BitImageProcessorPil(do_center_crop=False))
    assert pixels.size is None
    assert [tuple(item["pixel_values"].shape) for item in pixels] == [(3, 224, 336), (3, 336, 224)]
    with pytest.raises(ValueError, match=r"images of \(3, 224, 336\) and \(3, 336, 224\) cannot be stacked"):
        collate_pixels(list(pixels))


class Stubborn:
    """A processor that ignores the size it was given."""

    do_resize, size, resample = True, {"height": 10, "width": 10}, None

    def __call__(self, images, **options):
        return {"pixel_values": torch.zeros(1, 3, 10, 10)}


def test_a_processor_that_ignores_its_size_is_caught():
    assert PixelDataset(load_images([noise()]), Stubborn())[0]["pixel_values"].shape == (3, 10, 10)
    for augment in ("none", "crop_flip"):
        pixels = PixelDataset(load_images([noise()]), Stubborn(), image_size=8, augment=augment)
        with pytest.raises(
            ValueError, match=r"Stubborn made \(3, 10, 10\) of image 0, expected 3 channels of \(8, 8\)"
        ):
            pixels[0]


@pytest.mark.slow
def test_dinov2_processor_works_without_torchvision(tmp_path):
    code = (
        "import sys; sys.modules['torchvision'] = None\n"
        "from transformers import AutoImageProcessor\n"
        "from raptor_hf.data import dinov2_processor\n"
        "dinov2_processor().save_pretrained(sys.argv[1])\n"
        "sys.stdout.write(type(AutoImageProcessor.from_pretrained(sys.argv[1])).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "BitImageProcessorPil"


# ------------------------------------------------------------------------------------------------------ augmentation


def augmented(count=6, **options):
    images = load_images([(noise(40, 60, seed=index), index) for index in range(count)])
    return PixelDataset(images, dinov2_processor(), image_size=28, augment="crop_flip", **options)


def all_pixels(pixels):
    return torch.stack([item["pixel_values"] for item in pixels])


def test_crop_and_flip_equal_pillow_by_hand():
    pixels = augmented(count=8, seed=3, scale=(0.3, 0.5))
    pixels.set_epoch(2)
    flips = 0
    for index in range(8):
        rng = np.random.default_rng([3, 2, index])
        image = noise(40, 60, seed=index)
        image = image.resize((28, 28), Image.Resampling.BICUBIC, box=random_crop_box(image.size, rng, (0.3, 0.5)))
        if rng.random() < 0.5:
            image, flips = ImageOps.mirror(image), flips + 1
        expected = normalised(image, DINOV2_MEAN, DINOV2_STD)
        torch.testing.assert_close(pixels[index]["pixel_values"].double(), expected, rtol=1e-6, atol=1e-6)
    assert 0 < flips < 8


def test_augmentation_depends_on_its_key_alone():
    pixels = augmented()
    first = all_pixels(pixels)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    backwards = torch.stack([pixels[index]["pixel_values"] for index in reversed(range(6))]).flip(0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert random.getstate() == states[2]
    torch.manual_seed(9)
    np.random.seed(9)  # noqa: NPY002
    random.seed(9)
    assert torch.equal(all_pixels(pixels), first)
    assert torch.equal(all_pixels(augmented()), first)
    assert torch.equal(backwards, first)
    assert torch.equal(pixels[-1]["pixel_values"], first[5])


def test_epoch_seed_and_index_each_change_the_augmentation():
    pixels = augmented()
    first = all_pixels(pixels)
    pixels.set_epoch(1)
    second = all_pixels(pixels)
    other = all_pixels(augmented(seed=1))
    same_image = PixelDataset(load_images([noise(40, 60)] * 6), pixels.processor, augment="crop_flip")
    for a, b in ((first, second), (first, other), (second, other)):
        assert (a != b).flatten(1).any(1).all()
    assert len({item["pixel_values"].numpy().tobytes() for item in same_image}) == 6
    pixels.set_epoch(0)
    assert torch.equal(all_pixels(pixels), first)


def test_scale_bounds_the_crop():
    boxes = [random_crop_box((1000, 800), np.random.default_rng(seed), (0.2, 0.4)) for seed in range(2000)]
    left, top, right, bottom = np.array(boxes).T
    area, log_ratio = (right - left) * (bottom - top) / 8e5, np.log((right - left) / (bottom - top))
    assert 0.199 < area.min() < 0.21
    assert 0.39 < area.max() < 0.401
    assert np.abs(log_ratio).max() < np.log(4 / 3) + 0.005
    # uniform area and log ratio: mean and variance of the uniform distribution, within four standard errors
    assert abs(area.mean() - 0.3) < 4 * 0.2 / np.sqrt(12 * 2000)
    assert abs(log_ratio.mean()) < 4 * 2 * np.log(4 / 3) / np.sqrt(12 * 2000)
    assert abs(log_ratio.var() / (np.log(4 / 3) ** 2 / 3) - 1) < 0.1
    assert min(left) < 5
    assert max(right) > 995


@pytest.mark.parametrize(
    ("size", "box"), [((900, 30), (430, 0, 470, 30)), ((30, 900), (0, 430, 30, 470)), ((1, 1), None)]
)
def test_crop_of_extreme_images_falls_back_to_the_centre(size, box):
    found = random_crop_box(size, np.random.default_rng(0), scale=(1.0, 1.0))
    assert found == (box or (0, 0, 1, 1))


def test_pixel_dataset_options_are_checked():
    images = load_images([noise()])
    for options in (
        {"augment": "mixup"},
        {"scale": (0.0, 1.0)},
        {"scale": (0.9, 0.5)},
        {"scale": (0.5, 2)},
        {"seed": -1},
    ):
        with pytest.raises(ValueError, match="use augment 'none' or 'crop_flip', 0 < scale"):
            PixelDataset(images, dinov2_processor(), **options)
    with pytest.raises(ValueError, match=r"augment='crop_flip' needs one size, .* pass image_size"):
        PixelDataset(images, BitImageProcessorPil(do_center_crop=False), augment="crop_flip")


# ------------------------------------------------------------------------------------------------------------ loading


def loader(pixels, num_workers, **options):
    return torch.utils.data.DataLoader(
        pixels, batch_size=4, collate_fn=collate_pixels, num_workers=num_workers, **options
    )


def test_collate_stacks_pixels_and_labels():
    batches = list(loader(augmented(), 0))
    assert [tuple(batch["pixel_values"].shape) for batch in batches] == [(4, 3, 28, 28), (2, 3, 28, 28)]
    assert batches[0]["labels"].dtype == torch.int64
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == list(range(6))
    unlabelled = PixelDataset(load_images([noise()]), dinov2_processor(28))
    assert list(collate_pixels(list(unlabelled))) == ["pixel_values"]


def test_workers_that_outlive_an_epoch_give_the_same_pixels(tmp_path):
    images = load_images(make_folder(tmp_path / "set", per_class=3))
    pixels = PixelDataset(images, dinov2_processor(28), augment="crop_flip")
    workers = loader(pixels, 2, persistent_workers=True)
    seen = []
    for epoch in range(2):
        pixels.set_epoch(epoch)
        for with_workers, without in zip(workers, loader(pixels, 0), strict=True):
            assert torch.equal(with_workers["pixel_values"], without["pixel_values"])
            assert torch.equal(with_workers["labels"], without["labels"])
            seen.append(without["pixel_values"])
    assert not torch.equal(seen[0], seen[2])


def test_select_keeps_images_and_labels_together():
    images = ImageDataset([noise(seed=index) for index in range(4)], [0, 1, 2, 3], list("abcd"), "set")
    part = images.select([3, 1]).select([1, 0])
    assert (part.labels, len(part), part.label_names, part.name) == ([1, 3], 2, list("abcd"), "set")
    assert np.array_equal(pixels_of(part[1]["image"]), pixels_of(noise(seed=3)))
    assert len(images) == 4


def test_a_file_that_vanishes_after_loading_is_named(tmp_path):
    root = make_folder(tmp_path / "set")
    images = load_images(root)
    shutil.rmtree(root / "bee")
    with pytest.raises(ValueError, match=r"image 3 of 'set' \(.*1.png\) cannot be read"):
        images[3]
