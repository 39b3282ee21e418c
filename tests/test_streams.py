"""A stream gives every image once per pass, in an order that a resumed run finds again, and names what is damaged."""

import io
import itertools
import json
import logging
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader
from PIL import Image
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from raptor_hf.data import PixelDataset, dinov2_processor, load_images
from raptor_hf.streams import ImageStream, PixelStream, load_stream

PROCESSOR = dinov2_processor(28)


def png(number, size=(32, 30)):
    """A PNG of noise that differs from number to number."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path, samples):
    """A tar of `(file name, contents)`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, contents in samples:
            entry = tarfile.TarInfo(name)
            entry.size = len(contents)
            archive.addfile(entry, io.BytesIO(contents))


def write_shards(root, shards=4, per_shard=10, damaged=(), prefix="", start=0):
    """Shards in WebDataset form; the class of an image is its number, so that labels show the order."""
    for shard in range(shards):
        samples = []
        for number in range(start + shard * per_shard, start + (shard + 1) * per_shard):
            contents = b"no image at all" if number in damaged else png(number)
            samples += [(f"{number:04d}.png", contents), (f"{number:04d}.cls", str(number).encode())]
        write_tar(root / f"{prefix}{shard:04d}.tar", samples)
    return root


def write_folder(root, count=40):
    """`count` images in the class folders `even` and `odd`."""
    for number in range(count):
        path = root / ("odd" if number % 2 else "even") / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return root


def stream(root, buffer=8, seed=0, on_error="raise", **options):
    images = load_stream(root, shuffle_buffer=buffer, seed=seed, on_error=on_error)
    return PixelStream(images, PROCESSOR, **{"repeat": False, **options})


def labels(items):
    return [item["label"] for item in items]


@pytest.fixture
def shards(tmp_path):
    """40 images of classes 0..39 in 4 shards."""
    return write_shards(tmp_path / "shards")


# ----------------------------------------------------------------------------------------------------------- sources


def test_shards_give_the_items_of_a_pixel_dataset(shards):
    items = list(stream(shards, buffer=0))
    expected = PixelDataset(load_images([Image.open(io.BytesIO(png(n))) for n in range(40)]), PROCESSOR)
    assert labels(items) == list(range(40))
    assert all(torch.equal(item["pixel_values"], expected[i]["pixel_values"]) for i, item in enumerate(items))


def test_splits_of_shards_are_found_by_name(tmp_path):
    write_shards(tmp_path / "sub" / "train", 1, 3)
    write_shards(tmp_path / "sub" / "val", 1, 2, start=10)
    assert labels(load_stream(tmp_path / "sub", shuffle_buffer=0)) == [0, 1, 2]
    assert labels(load_stream(tmp_path / "sub", split="validation", shuffle_buffer=0)) == [10, 11]
    write_shards(tmp_path / "flat", 1, 3, prefix="data-train-")
    write_shards(tmp_path / "flat", 1, 2, prefix="data-test-", start=10)
    assert labels(load_stream(tmp_path / "flat", shuffle_buffer=0)) == [0, 1, 2]
    assert labels(load_stream(tmp_path / "flat", split="test", shuffle_buffer=0)) == [10, 11]
    with pytest.raises(ValueError, match=r"split='extra'.*choose one of: "):
        load_stream(tmp_path / "flat", split="extra")


def test_a_folder_of_images_has_the_classes_of_load_images(tmp_path):
    root = write_folder(tmp_path / "parity", 6)
    images = load_stream(root, shuffle_buffer=0)
    assert (images.name, images.label_names) == ("parity", ["even", "odd"])
    assert labels(images) == load_images(root).labels == [0, 0, 0, 1, 1, 1]
    assert len(list(load_stream(write_folder(tmp_path / "splits" / "test", 4).parent, split="test"))) == 4


def test_iterable_datasets_are_read_undecoded_so_that_exif_is_applied():
    exif = Image.Exif()
    exif[274] = 6  # shown turned by a quarter
    buffer = io.BytesIO()
    Image.new("CMYK", (30, 20)).save(buffer, "JPEG", exif=exif)
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"img": [{"bytes": buffer.getvalue(), "path": None}] * 2, "fine_label": [1, 0]}
    table = datasets.Dataset.from_dict(rows, features=features).to_iterable_dataset().with_format("torch")
    images = load_stream(table, shuffle_buffer=0)
    items = list(images)
    assert [(item["image"].mode, item["image"].size) for item in items] == [("RGB", (20, 30))] * 2
    assert (labels(items), images.label_names) == ([1, 0], ["a", "b"])
    assert labels(load_stream(datasets.IterableDatasetDict({"train": table}), shuffle_buffer=0)) == [1, 0]


def test_datasets_without_known_columns_are_looked_at(tmp_path):
    rows = [{"image": Image.open(io.BytesIO(png(number))), "label": number} for number in range(3)]
    source = datasets.IterableDataset.from_generator(lambda: iter(rows))
    mapped = source.map(lambda row: {"image": row["image"], "label": row["label"]})
    assert mapped.features is None
    assert sorted(labels(load_stream(mapped))) == [0, 1, 2]


def test_remote_files_are_fetched(tmp_path):
    import fsspec

    with fsspec.open("memory://stream/one.png", "wb") as file:
        file.write(png(1))
    rows = {"image": [{"bytes": None, "path": "memory://stream/one.png"}]}
    source = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image(decode=False))
    (item,) = load_stream(source.to_iterable_dataset())
    assert np.array_equal(item["image"], Image.open(io.BytesIO(png(1))))


def test_an_outage_is_not_taken_for_damage():
    rows = {"image": [{"bytes": None, "path": "memory://stream/gone.png"}]}
    source = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image(decode=False))
    images = load_stream(source.to_iterable_dataset(), on_error="skip")
    with pytest.raises(FileNotFoundError, match="gone"):
        list(images)
    assert images.num_skipped == 0


def test_hub_ids_are_streamed_by_datasets(monkeypatch):
    asked = {}

    def load_dataset(name, **options):
        asked.update(options, name=name)
        return datasets.Dataset.from_dict({"image": [png(1)], "label": ["a name"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    images = load_stream("someone/images", split="validation", revision="main")
    assert asked == {"name": "someone/images", "split": "validation", "streaming": True, "revision": "main"}
    assert images.name == "someone/images"
    assert [list(item) for item in images] == [["image"]]  # a stream cannot number class names
    with pytest.raises(ValueError, match="label_column='label' of 'someone/images' holds string"):
        load_stream("someone/images", label_column="label")


def test_what_cannot_be_streamed_says_what_can(monkeypatch, tmp_path):
    for source in ("digits", tmp_path / "nothing", "./nothing"):
        with pytest.raises(ValueError, match=r"a stream is a folder of \.tar shards or of images"):
            load_stream(source)
    with pytest.raises(ValueError, match="a Dataset cannot be streamed; use load_images"):
        load_stream(datasets.Dataset.from_dict({"image": [png(1)]}))
    with pytest.raises(ValueError, match="image_column='picture' is no column; choose one of: image"):
        load_stream(datasets.Dataset.from_dict({"image": [png(1)]}).to_iterable_dataset(), image_column="picture")
    with pytest.raises(ValueError, match="holds no image"):
        load_stream(datasets.IterableDataset.from_generator(lambda: iter(())))

    def fail(*args, **options):
        raise datasets.exceptions.DatasetNotFoundError("it is\ngated")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"'someone/images' is no folder here and did not load .*\(it is gated\)"):
        load_stream("someone/images")


def test_names_of_shards_are_taken_as_they_are(tmp_path):
    root = write_shards(tmp_path / "a [b] *", 1, 2)
    (root / "._0000.tar").write_bytes(b"what macOS leaves")
    assert labels(load_stream(root, shuffle_buffer=0)) == [0, 1]


def test_shards_that_are_no_webdataset_are_named(tmp_path):
    write_tar(tmp_path / "0000.tar", [("0.png", png(0)), ("1.jpg", png(1))])
    with pytest.raises(ValueError, match=r"the shards .*0000.tar ... do not open as WebDataset"):
        load_stream(tmp_path)


@pytest.mark.parametrize("options", [{"on_error": "ignore"}, {"shuffle_buffer": -1}, {"seed": -1}])
def test_options_are_checked(shards, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        load_stream(shards, **options)


def test_options_of_the_pixels_are_checked(shards):
    with pytest.raises(ValueError, match="augment='rotate'"):
        PixelStream(load_stream(shards), PROCESSOR, augment="rotate")


# ------------------------------------------------------------------------------------------------- order and damage


@pytest.mark.parametrize("kind", ["shards", "folder"])
def test_order_depends_on_seed_and_epoch_alone(tmp_path, kind):
    root = write_shards(tmp_path / "s") if kind == "shards" else write_folder(tmp_path / "f")

    def order(seed=0, epoch=0):
        torch.rand(1), np.random.default_rng().random()  # what others draw must not matter
        pixels = stream(root, seed=seed)
        pixels.set_epoch(epoch)
        return [round(item["pixel_values"].double().sum().item(), 6) for item in pixels]

    first = order()
    assert len(set(first)) == 40
    assert order() == first
    for other in (order(epoch=1), order(seed=1)):
        assert other != first
        assert sorted(other) == sorted(first)


def test_augmentation_is_keyed_by_seed_epoch_and_position(shards):
    def crops(epoch=0, seed=0):
        pixels = stream(shards, buffer=0, augment="crop_flip", seed=0)
        pixels = PixelStream(pixels.images, PROCESSOR, augment="crop_flip", seed=seed, repeat=False)
        pixels.set_epoch(epoch)
        return [item["pixel_values"] for item in itertools.islice(pixels, 6)]

    first = crops()
    files = load_images([Image.open(io.BytesIO(png(number))) for number in range(6)])
    reference = PixelDataset(files, PROCESSOR, augment="crop_flip")
    for position, pixels in enumerate(first):
        assert torch.equal(pixels, reference[position]["pixel_values"])  # keys as in PixelDataset
    for other in (crops(epoch=1), crops(seed=1)):
        assert not any(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_workers_do_not_share_their_draws(shards, monkeypatch):
    monkeypatch.setattr("raptor_hf.streams.get_worker_info", lambda: SimpleNamespace(id=1, num_workers=2))
    files = load_images([Image.open(io.BytesIO(png(index // 2))) for index in range(12)])
    reference = PixelDataset(files, PROCESSOR, augment="crop_flip")
    for position, item in enumerate(itertools.islice(stream(shards, buffer=0, augment="crop_flip"), 6)):
        assert torch.equal(item["pixel_values"], reference[2 * position + 1]["pixel_values"])


def test_a_repeated_stream_shuffles_every_pass_anew(shards):
    endless = stream(shards, repeat=True)
    passes = np.array(labels(itertools.islice(endless, 120))).reshape(3, 40)
    assert all(sorted(one) == list(range(40)) for one in passes.tolist())
    assert len({tuple(one) for one in passes.tolist()}) == 3
    second = stream(shards)
    second.set_epoch(1)
    assert labels(second) == passes[1].tolist()


@pytest.mark.parametrize("kind", ["shards", "folder"])
def test_a_damaged_image_is_named_with_its_row(tmp_path, kind):
    if kind == "shards":
        root, name = write_shards(tmp_path / "s", damaged=[13]), r"0013.png in \S*0001.tar"
    else:
        root, name = write_folder(tmp_path / "f"), r"\S*odd.27.png"
        (root / "odd" / "27.png").write_bytes(b"no image at all")
    row = 13 if kind == "shards" else 33
    with pytest.raises(ValueError, match=rf"row {row} of '\w' \({name}\) cannot be read.*on_error='skip'"):
        list(stream(root, buffer=0))


def test_skipped_images_are_counted_and_logged_and_the_others_keep_their_keys(tmp_path, caplog):
    whole = write_shards(tmp_path / "whole")
    root = write_shards(tmp_path / "broken", damaged=[3, 17])
    pixels = stream(root, on_error="skip", augment="crop_flip")
    with caplog.at_level(logging.WARNING):
        items = {item["label"]: item["pixel_values"] for item in pixels}
    assert (len(items), pixels.num_skipped) == (38, 2)
    assert len([record for record in caplog.records if "Left out: row" in record.message]) == 2
    for item in stream(whole, augment="crop_flip"):
        assert item["label"] in (3, 17) or torch.equal(item["pixel_values"], items[item["label"]])
    list(pixels)
    assert pixels.num_skipped == 2  # of this iteration, not of all


def test_a_row_without_image_or_label_is_damaged():
    rows = {"image": [png(0), None, png(2)], "label": [0, 1, None]}
    images = load_stream(datasets.Dataset.from_dict(rows).to_iterable_dataset(), shuffle_buffer=0, on_error="skip")
    assert labels(images) == [0]
    assert images.num_skipped == 2
    for wrong, message in ((1, "it has no image"), (2, "it has no label")):
        table = datasets.Dataset.from_dict(rows).select([0, wrong])
        with pytest.raises(ValueError, match=f"row 1 of .*{message}"):
            list(load_stream(table.to_iterable_dataset(), shuffle_buffer=0))


@pytest.mark.parametrize("repeat", [False, True])
def test_a_stream_of_damaged_images_ends_with_an_error(tmp_path, repeat):
    root = write_shards(tmp_path / "s", 1, 4, damaged=range(4))
    with pytest.raises(ValueError, match="none of the 4 rows of 's' can be read"):
        list(stream(root, on_error="skip", repeat=repeat))


# ------------------------------------------------------------------------------------------- workers and processes


@pytest.mark.parametrize("kind", ["shards", "folder"])
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_give_each_image_once(tmp_path, kind, workers):
    root = write_shards(tmp_path / "s", damaged=[7]) if kind == "shards" else write_folder(tmp_path / "f")
    pixels = stream(root, on_error="skip")
    items = list(DataLoader(pixels, batch_size=None, num_workers=workers))
    assert len({tuple(item["pixel_values"].flatten().tolist()) for item in items}) == len(items)
    assert len(items) == (39 if kind == "shards" else 40)
    assert pixels.num_skipped == (kind == "shards")  # counted by whichever worker met it


def test_surplus_workers_have_nothing_to_do(tmp_path):
    root = write_shards(tmp_path / "s", 1, 4)
    loader = DataLoader(stream(root, repeat=True), batch_size=None, num_workers=2)
    assert set(labels(itertools.islice(loader, 12))) == {0, 1, 2, 3}


def test_passes_of_workers_do_not_disturb_each_other(tmp_path):
    """A worker whose shard is short is in a later pass than the others, which must not move their epoch."""
    write_shards(tmp_path / "s", 1, 2, prefix="short")
    write_shards(tmp_path / "s", 1, 12, prefix="tall", start=10)

    def crops():
        pixels = stream(tmp_path / "s", repeat=True, augment="crop_flip")
        loader = DataLoader(pixels, batch_size=None, num_workers=2, prefetch_factor=4)
        return [(item["label"], item["pixel_values"]) for item in itertools.islice(loader, 40)]

    first, again = crops(), crops()
    assert [label for label, _ in first] == [label for label, _ in again]
    assert all(torch.equal(one, two) for (_, one), (_, two) in zip(first, again, strict=True))


def test_workers_that_outlive_an_epoch_take_the_next_one(shards):
    pixels = stream(shards)
    loader = DataLoader(pixels, batch_size=None, num_workers=1, persistent_workers=True)
    orders = []
    for epoch in range(2):
        pixels.set_epoch(epoch)
        orders.append(labels(loader))
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))


def prepared(pixels, **options):
    return prepare_data_loader(DataLoader(pixels, batch_size=5), torch.device("cpu"), put_on_device=True, **options)


def test_processes_get_alternating_parts_of_one_order(shards):
    parts = [
        [label for batch in prepared(stream(shards), num_processes=2, process_index=rank, dispatch_batches=False)
         for label in batch["label"].tolist()]
        for rank in range(2)
    ]  # fmt: skip
    order = np.array(labels(stream(shards))).reshape(4, 2, 5)
    assert parts == [order[:, rank].flatten().tolist() for rank in range(2)]


def test_a_dispatcher_moves_the_epoch(shards):
    loader = prepared(stream(shards), num_processes=1, process_index=0, dispatch_batches=True)
    assert isinstance(loader, DataLoaderDispatcher)
    orders = [[label for batch in loader for label in batch["label"].tolist()] for _ in range(2)]
    second = stream(shards)
    second.set_epoch(1)
    assert orders == [labels(stream(shards)), labels(second)]


# ---------------------------------------------------------------------------------------------------------- resuming


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("per_shard", "stop"), [(10, 2), (4, 3)])  # in the first pass, and amid the second
def test_a_resumed_training_is_bit_equal(make_trainer, tmp_path, per_shard, stop, workers):
    root = write_shards(tmp_path / "s", 2, per_shard)

    def train(folder, callbacks=None, resume=None):
        pixels = stream(root, repeat=True, augment="crop_flip")
        options = {"stage": "end_to_end", "dataloader_num_workers": workers, "seed": 0}
        trainer = make_trainer(folder, train=pixels, evaluation=None, callbacks=callbacks, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = train("straight")
    assert train("broken", [StopAt(stop)]).state.global_step == stop
    resumed = train("broken", resume=True)
    assert resumed.state.global_step == 4
    own, expected = resumed.raptor.state_dict(), straight.raptor.state_dict()
    assert [name for name in own if not torch.equal(own[name], expected[name])] == []


def test_a_fast_resume_does_not_read_again_what_was_seen(make_trainer, shards, monkeypatch):
    options = {"stage": "end_to_end", "fast_resume": True, "evaluation": None, "loss_scale": "none"}
    make_trainer("run", train=stream(shards, buffer=0, repeat=True), callbacks=[StopAt(2)], **options).train()
    read, items = [], ImageStream.items

    def watched(self, rows, first=0):
        for place, item in items(self, rows, first):
            read.append(item["label"])
            yield place, item

    monkeypatch.setattr(ImageStream, "items", watched)
    resumed = make_trainer("run", train=stream(shards, buffer=0, repeat=True), **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert min(read) >= 8  # two batches of four were seen
    read.clear()
    options["fast_resume"] = False
    shutil.rmtree(Path(resumed.args.output_dir) / "checkpoint-3")
    shutil.rmtree(Path(resumed.args.output_dir) / "checkpoint-4")
    make_trainer("run", train=stream(shards, buffer=0, repeat=True), **options).train(resume_from_checkpoint=True)
    assert min(read) == 0  # a replay reads past them


def test_an_endless_stream_is_no_evaluation_set(make_trainer, shards):
    with pytest.raises(ValueError, match="never ends; make its PixelStream with repeat=False"):
        make_trainer(evaluation=stream(shards, repeat=True))


def test_streams_of_images_go_through_the_processor(make_trainer, shards):
    trainer = make_trainer(train=load_stream(shards), evaluation=load_stream(shards))
    assert trainer.train_dataset.repeat
    assert trainer.train().global_step == 4
    trainer.evaluate()
    assert trainer.fidelity.num_images == 40


def test_a_training_without_max_steps_names_the_flag(make_trainer, shards):
    pixels = stream(shards, repeat=True)
    with pytest.raises(ValueError, match="--max_steps"):
        make_trainer(train=pixels, max_steps=-1)
    with pytest.raises(TypeError, match="--max_steps"):
        len(pixels)


def resume_after(root, count, buffer):
    """What a run sees before and after a fast resume that comes after `count` images."""
    first = stream(root, buffer)
    before = labels(itertools.islice(first, count))
    state = json.loads(json.dumps(first.state_dict()))
    resumed = stream(root, buffer)
    resumed.load_state_dict(state)
    return before, labels(resumed)


@pytest.mark.parametrize("count", [5, 20, 30, 40])
def test_fast_resume_loses_what_was_buffered_and_nothing_else(shards, count, caplog):
    before, after = resume_after(shards, count, buffer=8)
    assert len({*before, *after}) == len(before) + len(after)  # no image twice
    lost = set(range(40)) - {*before, *after}
    assert len(lost) <= 8
    assert bool(lost) == (count < 40)
    assert "at most 8" in caplog.text


@pytest.mark.parametrize("count", [1, 20, 40])
def test_fast_resume_without_a_buffer_is_exact(shards, count, caplog):
    before, after = resume_after(shards, count, buffer=0)
    assert before + after == list(range(40))
    assert caplog.text == ""


def test_fast_resume_goes_on_in_its_pass_with_the_same_augmentation(shards):
    options = {"buffer": 0, "repeat": True, "augment": "crop_flip"}
    straight = list(itertools.islice(stream(shards, **options), 90))
    first = stream(shards, **options)
    list(itertools.islice(first, 50))
    resumed = stream(shards, **options)
    resumed.load_state_dict(first.state_dict())
    resumed.set_epoch(0)  # as the Trainer does
    items = itertools.islice(resumed, 40)
    assert all(torch.equal(a["pixel_values"], b["pixel_values"]) for a, b in zip(items, straight[50:], strict=True))
    resumed.set_epoch(1)  # the state is of epoch 0
    assert labels(itertools.islice(resumed, 3)) == [0, 1, 2]


def test_fast_resume_of_arrow_sources_loses_no_more_than_the_buffer(tmp_path):
    rows = {"image": [png(number) for number in range(40)], "label": list(range(40))}
    source = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)
    for count in (5, 12, 20, 30):
        before, after = resume_after(source, count, buffer=8)
        assert 40 - len({*before, *after}) <= 8


def test_fast_resume_is_refused_with_workers(shards, monkeypatch):
    pixels = stream(shards)
    with pytest.raises(ValueError, match="nothing was read in this process"):
        pixels.state_dict()
    labels(itertools.islice(pixels, 3))
    state = pixels.state_dict()
    labels(DataLoader(pixels, batch_size=None, num_workers=1))
    with pytest.raises(ValueError, match="--dataloader_num_workers 0"):
        pixels.state_dict()  # it would be that of the three images
    pixels.load_state_dict(state)
    worker = SimpleNamespace(id=0, num_workers=2)  # not a real one: torch takes five seconds to end one that failed
    monkeypatch.setattr("raptor_hf.streams.get_worker_info", lambda: worker)
    with pytest.raises(ValueError, match="fast resume with 2 DataLoader workers"):
        next(iter(pixels))


def test_a_state_of_another_stream_is_refused(shards):
    pixels = stream(shards)
    next(iter(pixels))
    for other in (stream(shards, seed=1), stream(shards, buffer=9)):
        with pytest.raises(ValueError, match="use the same, or replay"):
            other.load_state_dict(pixels.state_dict())
    with pytest.raises(ValueError, match="use the same, or replay"):
        pixels.load_state_dict({})
