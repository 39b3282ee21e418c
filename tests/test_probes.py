"""Linear probes: one loop for teacher and student, features by group, and the numbers it reports."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from raptor_hf import RaptorModel
from raptor_hf.data import dinov2_processor, load_images
from raptor_hf.probes import IMAGE_CLASSIFICATION, LinearProbe, ProbeArguments, ProbeResult
from raptor_hf.streams import load_stream
from raptor_hf.tokens import TokenLayout

FAST = {"learning_rate": 1e-1, "num_epochs": 20, "batch_size": 8, "augment": "none", "seeds": (0, 1)}


def coloured(count, shift=0):
    """Red and blue images with noise: a random ViT's features tell them apart."""
    rng = np.random.default_rng(shift)
    items = []
    for index in range(count):
        pixels = rng.integers(0, 90, (28, 28, 3), dtype=np.uint8)
        pixels[..., 2 * (index % 2)] += 160
        items.append({"image": Image.fromarray(pixels), "label": index % 2})
    return load_images(items)


@pytest.fixture
def teacher(make_teacher):
    return make_teacher(image_size=28)


@pytest.fixture
def processor():
    return dinov2_processor(28)


@pytest.fixture
def probe():
    return LinearProbe(coloured(24), coloured(10, shift=1), ProbeArguments(**FAST))


def test_the_same_code_gives_teacher_and_its_exact_copy_the_same_values(probe, teacher, processor):
    copy = RaptorModel.from_teacher(teacher, (1, 1, 1))
    own, student = probe(teacher, processor), probe(copy, processor)
    assert own.values == student.values
    assert own.mean == 1.0
    assert student.retained(own) == 1.0
    assert own.num_scored == 10


def test_values_are_deterministic_and_do_not_touch_the_global_generator(probe, teacher, processor):
    torch.manual_seed(11)
    first = probe(teacher, processor)
    after = torch.rand(1)
    torch.manual_seed(11)
    assert torch.rand(1) == after
    assert probe(teacher, processor).values == first.values


def test_the_backbone_is_not_trained(probe, teacher, processor):
    before = {name: value.clone() for name, value in teacher.model.state_dict().items()}
    probe(teacher, processor)
    assert all(torch.equal(value, before[name]) for name, value in teacher.model.state_dict().items())


def test_shuffled_labels_are_not_learned(teacher, processor):
    train, evaluation = coloured(24), coloured(10, shift=1)
    train.labels = np.random.default_rng(0).permutation(train.labels).tolist()
    result = LinearProbe(train, evaluation, ProbeArguments(**FAST))(teacher, processor)
    assert result.mean < 0.95


@pytest.mark.parametrize("augment", ["none", "crop_flip"])
def test_both_ways_of_reading_images_learn(teacher, processor, augment):
    arguments = ProbeArguments(**{**FAST, "augment": augment, "num_epochs": 5, "seeds": (0,)})
    assert LinearProbe(coloured(24), coloured(10, shift=1), arguments)(teacher, processor).mean == 1.0


def test_best_looks_at_every_epoch_and_at_the_start(teacher, processor):
    ruined = {**FAST, "learning_rate": 1e4, "num_epochs": 2, "seeds": (0,), "max_grad_norm": 0.0}
    sets = coloured(24), coloured(10, shift=1)
    last = LinearProbe(*sets, ProbeArguments(**ruined, select="last"))(teacher, processor).mean
    best = LinearProbe(*sets, ProbeArguments(**ruined, select="best"))(teacher, processor).mean
    start = LinearProbe(*sets, ProbeArguments(**{**ruined, "num_epochs": 0}))(teacher, processor).mean
    assert best >= max(last, start)


def test_features_are_cls_and_mean_patch_without_registers():
    states = torch.randn(2, 1 + 3 + 6, 4)
    features = IMAGE_CLASSIFICATION.features(states, TokenLayout(3))
    torch.testing.assert_close(features, torch.cat([states[:, 0], states[:, 4:].mean(1)], dim=-1))
    states[:, 1:4] = 1e6
    torch.testing.assert_close(IMAGE_CLASSIFICATION.features(states, TokenLayout(3)), features)


def test_a_share_of_nothing_is_none():
    zero, one = (ProbeResult("task", "mean_iou", [value], 1, 0, {}) for value in (0.0, 1.0))
    assert (one.retained(zero), zero.retained(one)) == (None, 0.0)


def test_image_size_replaces_the_processors(teacher, processor):
    arguments = ProbeArguments(**{**FAST, "seeds": (0,)})
    result = LinearProbe(coloured(24), coloured(10, shift=1), arguments, image_size=42)(teacher, processor)
    assert result.mean == 1.0
    assert result.protocol["image_size"] == 42


def test_results_as_plain_values():
    teacher = ProbeResult("image-classification", "accuracy", [0.9, 0.8], 10, 1, {})
    student = ProbeResult("image-classification", "accuracy", [0.68], 10, 0, {})
    assert teacher.mean == pytest.approx(0.85)
    assert teacher.std == pytest.approx(0.0707, abs=1e-4)
    assert student.std is None
    assert student.to_dict(teacher)["retained"] == pytest.approx(0.8)
    assert "retained" not in teacher.to_dict()
    assert teacher.to_dict()["num_skipped"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "first"}, "select='first' is unknown; use one of last, best"),
        ({"learning_rate": 0.0}, "needs a positive learning rate"),
        ({"batch_size": 0}, "at least one image per step"),
        ({"seeds": ()}, "trains no head; give at least one seed"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ProbeArguments(**options)


def streamed(images):
    """The images as a stream of rows without names of classes."""
    rows = [images[index] for index in range(len(images))]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    table = datasets.Dataset.from_dict(
        columns, datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    )
    return load_stream(table.to_iterable_dataset(), shuffle_buffer=0)


def test_streams_give_what_files_give(probe, teacher, processor):
    images = [streamed(probe.train_images), streamed(probe.eval_images)]
    other = LinearProbe(*images, ProbeArguments(**FAST))
    assert other.get_config_dict()["num_classes"] == 0  # not known yet
    expected, found = probe(teacher, processor), other(teacher, processor)
    assert found.details == expected.details
    assert (found.num_scored, found.num_skipped) == (10, 0)
    assert other.num_classes == 2
    assert other.size(teacher, processor) == probe.size(teacher, processor)
    torch.testing.assert_close(found.head.weight, expected.head.weight)


def test_streams_that_do_not_fit_are_named(teacher, processor):
    with pytest.raises(ValueError, match="augment='crop_flip': a stream is read once; give augment='none'"):
        LinearProbe(streamed(coloured(4)), streamed(coloured(4)))
    beyond = load_images([{"image": Image.new("RGB", (28, 28)), "label": 5}])
    probe = LinearProbe(streamed(coloured(4)), streamed(beyond), ProbeArguments(**FAST))
    with pytest.raises(ValueError, match="evaluation set has class 5, training ends at 1"):
        probe(teacher, processor)


def test_sets_that_do_not_fit_are_named():
    labelled = coloured(4)
    bare = load_images([{"image": Image.new("RGB", (8, 8))}])
    with pytest.raises(ValueError, match="the training set of a probe needs labelled images"):
        LinearProbe(bare, labelled)
    with pytest.raises(ValueError, match="the evaluation set of a probe needs labelled images"):
        LinearProbe(labelled, bare)
    beyond = load_images([{"image": Image.new("RGB", (8, 8)), "label": 5}])
    with pytest.raises(ValueError, match="evaluation set has class 5, training ends at 1"):
        LinearProbe(labelled, beyond)
    digits = load_images("digits", split="test", max_images=4)
    with pytest.raises(ValueError, match="training and evaluation set have different classes"):
        LinearProbe(labelled, digits)
