"""The teacher's states on disk: written once, gone on with, checked when read, and trained on like computed ones."""

import json
from types import SimpleNamespace

import datasets
import pytest
import torch
from torch.utils.data import DataLoader

from raptor_hf import RaptorModel
from raptor_hf.activations import ActivationCache, activation_bytes, cache_activations, collate_states
from raptor_hf.data import PixelDataset, dinov2_processor, load_images
from raptor_hf.streams import ImageStream, PixelStream

SHAPE = (5, 9, 32)  # L + 1 states, cls + 4 registers + 2 x 2 patches, hidden size
IMAGE_BYTES = 2 * 5 * 9 * 32


@pytest.fixture
def make_cache(teacher, digits, tmp_path):
    """Factory: the cache of 8 digits in three shards of 3, 3 and 2 images."""

    def factory(of=teacher, pixels=digits, folder=tmp_path / "cache", **options):
        return cache_activations(of, pixels, folder, **{"batch_size": 2, "shard_bytes": 3 * IMAGE_BYTES, **options})

    return factory


@pytest.fixture
def cache(make_cache):
    return make_cache()


def shards(folder):
    return sorted(folder.glob("states-*.safetensors"))


def test_items_are_the_teachers_states_rounded_to_bfloat16(cache, teacher, digits):
    assert len(cache) == 8
    assert cache.state_shape == SHAPE
    for index in range(8):
        states = teacher.hidden_states(digits[index]["pixel_values"][None])
        item = cache[index]["hidden_states"]
        assert item.dtype == torch.bfloat16
        torch.testing.assert_close(item.float(), torch.cat(states), rtol=2**-8, atol=1e-5)
    assert torch.equal(cache[-1]["hidden_states"], cache[7]["hidden_states"])
    with pytest.raises(IndexError):
        cache[8]


def test_the_size_is_known_before(cache, teacher, digits):
    data = sum(path.stat().st_size for path in shards(cache.folder))
    assert activation_bytes(teacher, digits) == 8 * IMAGE_BYTES
    assert 8 * IMAGE_BYTES < data < 8 * IMAGE_BYTES + 3 * 1024  # and a header per shard
    assert [path.stat().st_size > 3 * IMAGE_BYTES for path in shards(cache.folder)] == [True, True, False]


def test_a_complete_cache_is_not_written_again(cache, make_cache):
    times = [path.stat().st_mtime_ns for path in shards(cache.folder)]
    seen = []
    again = make_cache(progress=lambda batches, total: seen.append(total) or batches)
    assert seen == [0]
    assert [path.stat().st_mtime_ns for path in shards(again.folder)] == times
    assert not list(cache.folder.glob(".*"))  # nothing temporary is left


@pytest.mark.parametrize("keep", [0, 200])
def test_an_interrupted_cache_goes_on(keep, cache, make_cache):
    first, second, third = shards(cache.folder)
    expected = [cache[index]["hidden_states"].clone() for index in range(8)]  # not the mapped file
    second.write_bytes(second.read_bytes()[:keep]) if keep else second.unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of its 3 shards, the first is states-00001.safetensors"):
        ActivationCache(cache.folder)
    kept = first.stat().st_mtime_ns, third.stat().st_mtime_ns
    again = make_cache()
    assert (first.stat().st_mtime_ns, third.stat().st_mtime_ns) == kept
    for index, states in enumerate(expected):
        assert torch.equal(again[index]["hidden_states"], states)


def test_a_write_that_fails_leaves_what_is_complete(teacher, digits, make_cache, tmp_path):
    class Broken(PixelDataset):
        def __getitem__(self, index):
            reads.append(index)
            if index == 5 and reads.count(5) == 2:  # the first time is for the description
                raise OSError(28, "No space left on device")
            return super().__getitem__(index)

    reads = []
    broken = Broken(digits.images, digits.processor)
    with pytest.raises(OSError, match=r"No space left"):
        make_cache(pixels=broken)
    assert [path.name for path in shards(tmp_path / "cache")] == ["states-00000.safetensors"]
    assert len(make_cache(pixels=broken)) == 8


@pytest.mark.parametrize("position", [-1, -IMAGE_BYTES // 2])
def test_a_damaged_byte_is_found_when_it_is_read(position, cache):
    path = shards(cache.folder)[1]
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    opened = ActivationCache(cache.folder)
    assert torch.isfinite(opened[4]["hidden_states"].float()).all()  # another image of the same shard
    with pytest.raises(ValueError, match=r"states-00001.safetensors is damaged: the states of image 5"):
        opened[5]


def test_a_file_that_is_no_shard_is_named(cache):
    shards(cache.folder)[0].write_bytes(b"x" * 10 * IMAGE_BYTES)
    with pytest.raises(ValueError, match=r"states-00000.safetensors cannot be read .*; delete it and run the command"):
        ActivationCache(cache.folder)[0]


def test_another_teacher_is_refused(cache, make_cache, make_teacher):
    other = make_teacher(num_hidden_layers=4, image_size=28, image_processor=dinov2_processor(28), seed=1)
    with pytest.raises(ValueError, match=r"was made with teacher_weights=.*, this run has"):
        make_cache(of=other)
    with pytest.raises(ValueError, match=r"was made by teacher .* with other weights"):
        cache.check_teacher(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 42}, r"made with image_size=\[28, 28\], this run has \[42, 42\]"),
        ({"mean": [0.5, 0.5, 0.5]}, r"made with processor=\{'image_mean': .*0.485.*\}, this run has .*0.5, 0.5"),
        ({"split": "test"}, "made with pixels=[0-9a-f]{64}, this run has"),
        ({"count": 7}, "made with num_images=8, this run has 7"),
        ({"name": "photos"}, "made with dataset=digits, this run has photos"),
    ],
)
def test_other_images_are_refused_with_what_differs(change, message, cache, make_cache):
    processor = dinov2_processor(28)
    processor.image_mean = change.get("mean", processor.image_mean)
    images = load_images("digits", split=change.get("split", "train"), max_images=change.get("count", 8))
    images.name = change.get("name", images.name)
    with pytest.raises(ValueError, match=message):
        make_cache(pixels=PixelDataset(images, processor, image_size=change.get("image_size")))
    assert len(ActivationCache(cache.folder)) == 8  # which is as it was


def test_what_cannot_be_stored_is_refused(make_cache, digits, teacher, tmp_path):
    with pytest.raises(ValueError, match=r"augment='crop_flip': an augmented image is another one in every epoch"):
        make_cache(pixels=PixelDataset(digits.images, digits.processor, augment="crop_flip"))
    rows = datasets.IterableDataset.from_generator(lambda: iter([{"image": digits.images[0]["image"]}]))
    stream = PixelStream(ImageStream(rows, "image"), digits.processor)
    with pytest.raises(ValueError, match=r"activation cache of a PixelStream: it needs images that can be counted"):
        make_cache(pixels=stream)
    with pytest.raises(ValueError, match=r"activation cache of no image"):
        make_cache(pixels=PixelDataset(digits.images.select([]), digits.processor))
    assert not (tmp_path / "cache").exists()


def test_the_size_is_bounded(make_cache, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"would take 2.3e-05 GB, more than the 2.3e-05 GB it may; allow more"):
        make_cache(max_bytes=8 * IMAGE_BYTES - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"but 1e-06 GB are free at .*cache; name a folder on another disk"):
        make_cache()
    assert not (tmp_path / "cache").exists()


def test_folders_that_are_no_cache_are_refused(make_cache, cache, tmp_path):
    with pytest.raises(ValueError, match=r"holds no activation cache; make one with cache_activations"):
        ActivationCache(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"mine is no activation cache and not empty; name a new folder"):
        make_cache(folder=tmp_path / "mine")
    record = json.loads((cache.folder / "cache.json").read_text())
    (cache.folder / "cache.json").write_text(json.dumps({**record, "format": 2}))
    with pytest.raises(ValueError, match=r"cannot be read .format 2, this version reads 1.; delete the cache"):
        ActivationCache(cache.folder)
    (cache.folder / "cache.json").write_text("{")
    with pytest.raises(ValueError, match=r"cache.json cannot be read"):
        ActivationCache(cache.folder)


def test_workers_read_it(cache):
    cache[0]  # a shard that is open here
    loader = DataLoader(cache, batch_size=4, num_workers=2, collate_fn=collate_states)
    batches = [batch["hidden_states"] for batch in loader]
    assert [batch.shape for batch in batches] == [(4, *SHAPE)] * 2
    assert torch.equal(torch.cat(batches)[5], cache[5]["hidden_states"])


@pytest.mark.parametrize("loss_scale", ["shared_variance", "none"])
@pytest.mark.parametrize("stage", ["blocks", "end_to_end"])
def test_training_on_it_is_training_on_the_teacher(
    stage, loss_scale, cache, teacher, digits, make_trainer, monkeypatch
):
    options = {"stage": stage, "loss_scale": loss_scale, "learning_rate": 1e-3, "block_optimizer": "adamw"}
    computed = make_trainer("computed", train=digits, evaluation=None, **options)
    computed.train()
    with monkeypatch.context() as patch:
        patch.setattr(teacher, "hidden_states", lambda *args: pytest.fail("the teacher was run"))
        read = make_trainer("read", train=cache, evaluation=None, **options)
        read.train()
    steps = [
        [(entry["loss"], entry["r2_layer_4"]) for entry in run.history if "loss" in entry] for run in (read, computed)
    ]
    assert len(steps[0]) == 4
    torch.testing.assert_close(torch.tensor(steps[0]), torch.tensor(steps[1]), rtol=2e-3, atol=1e-4)
    read.train_dataset, read.eval_dataset = digits, cache
    assert read.evaluate()["eval_r2"] == pytest.approx(read.evaluate(digits)["eval_r2"], abs=1e-3)


def test_a_trainer_refuses_states_of_another_teacher(cache, make_trainer, make_teacher):
    other = make_teacher(num_hidden_layers=4, image_size=28, image_processor=dinov2_processor(28), seed=1)
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"was made by teacher .* with other weights"):
        type(trainer)(RaptorModel.from_teacher(other, (2, 2)), other, trainer.args, cache)
