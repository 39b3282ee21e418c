import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, r2_score

import raptor_hf.metrics
from raptor_hf.dense_metrics import DepthRange, DepthScores, SegmentationScores
from raptor_hf.fidelity import R2_DEFINITIONS, cosine_from_sums, r2_from_sums, token_sums

FOLDER = Path(raptor_hf.metrics.__file__).parent

OFFLINE = """
import json
import socket
import sys

import raptor_hf
import raptor_hf.metrics

loaded_early = "evaluate" in sys.modules


def refuse(*args, **kwargs):
    raise OSError("the network was used")


socket.socket.connect = refuse

import evaluate

accuracy = {"predictions": [0, 1, 2, 2], "references": [0, 1, 1, 2]}
fidelity = {"predictions": [[1.0, 2.0], [3.0, 5.0]], "references": [[1.0, 2.0], [3.0, 4.0]]}
maps = {"predictions": [[[0, 1]]], "references": [[[0, 0]]]}
depths = {"predictions": [[[1.0, 2.0]]], "references": [[[2.0, 2.0]]]}
print(json.dumps({
    "loaded_early": loaded_early,
    "accuracy": raptor_hf.metrics.RaptorAccuracy().compute(**accuracy),
    "accuracy_by_path": evaluate.load(sys.argv[1] + "/accuracy.py").compute(**accuracy),
    "fidelity": raptor_hf.metrics.RaptorFidelity().compute(**fidelity),
    "fidelity_by_path": evaluate.load(sys.argv[1] + "/fidelity.py").compute(**fidelity),
    "mean_iou": raptor_hf.metrics.RaptorMeanIoU().compute(**maps, num_classes=2),
    "mean_iou_by_path": evaluate.load(sys.argv[1] + "/mean_iou.py").compute(**maps, num_classes=2),
    "depth": raptor_hf.metrics.RaptorDepth().compute(**depths, crop="none"),
    "depth_by_path": evaluate.load(sys.argv[1] + "/depth.py").compute(**depths, crop="none"),
}, allow_nan=False))
"""


@pytest.fixture
def make_metric(tmp_path):
    """Makes a metric of `raptor_hf.metrics` whose files are the test's own."""
    return lambda name: getattr(raptor_hf.metrics, name)(cache_dir=str(tmp_path))


def token_vectors(seed=0):
    generator = np.random.default_rng(seed)
    teacher = generator.normal(size=(40, 5)) * [4, 2, 1, 1, 0.5] + 3
    return teacher + 0.3 * generator.normal(size=teacher.shape), teacher


def test_offline_with_an_empty_cache_directly_and_by_path(tmp_path, monkeypatch):
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty"), "HF_EVALUATE_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_MODULES_CACHE", "HF_METRICS_CACHE", "HF_EVALUATE_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    command = [sys.executable, "-c", OFFLINE, str(FOLDER)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert not result["loaded_early"], "importing raptor_hf.metrics must not import evaluate"
    assert result["accuracy"] == {"accuracy": 0.75, "num_samples": 4, "n_scored": 4}
    assert result["fidelity"]["r2"] == pytest.approx(1 - 1 / 4)
    assert result["accuracy_by_path"] == result["accuracy"]
    assert result["fidelity_by_path"] == result["fidelity"]
    assert result["mean_iou_by_path"] == result["mean_iou"]
    assert result["mean_iou"]["mean_iou"] == 0.25
    assert result["depth_by_path"] == result["depth"]
    assert result["depth"]["rmse"] == pytest.approx(0.5**0.5)


@pytest.mark.parametrize("convert", [list, np.asarray, torch.tensor])
def test_accuracy_equals_scikit_learn(make_metric, convert):
    generator = np.random.default_rng(0)
    labels, predictions = generator.integers(0, 4, 50).tolist(), generator.integers(0, 4, 50).tolist()
    result = make_metric("RaptorAccuracy").compute(predictions=convert(predictions), references=convert(labels))
    assert result == {"accuracy": accuracy_score(labels, predictions), "num_samples": 50, "n_scored": 50}
    assert [type(value) for value in result.values()] == [float, int, int]


def test_incomplete_last_batch_is_scored_once_and_the_metric_can_be_used_again(make_metric):
    metric = make_metric("RaptorAccuracy")
    predictions, labels = [0, 1, 2, 3, 4], [0, 1, 2, 0, 0]
    for _ in range(2):
        for start in range(0, 5, 2):
            metric.add_batch(predictions=predictions[start : start + 2], references=labels[start : start + 2])
        assert metric.compute() == {"accuracy": 0.6, "num_samples": 5, "n_scored": 5}


def test_unlabelled_images_are_left_out_and_counted(make_metric):
    result = make_metric("RaptorAccuracy").compute(predictions=[1, 2, 3], references=[1, -1, 2], ignore_label=-1)
    assert result == {"accuracy": 0.5, "num_samples": 3, "n_scored": 2}


@pytest.mark.parametrize(
    ("predictions", "references", "options", "message"),
    [
        ([0.9, 1.0], [0, 1], {}, r"predictions hold 0\.9, which is no class id; pass logits\.argmax\(-1\)"),
        ([0, 1], [0, 0.5], {}, r"references hold 0\.5, which is no class id"),
        ([0, None], [0, 1], {}, "predictions hold nan"),
        ([[0.2, 0.8]], [1], {}, "don't match the expected format"),
        ([], [], {}, "none of 0 images has a label"),
        ([0, 1], [-1, -1], {"ignore_label": -1}, r"none of 2 images has a label to score \(ignore_label=-1\)"),
    ],
)
def test_accuracy_refuses_what_are_no_class_ids(make_metric, predictions, references, options, message):
    with pytest.raises(ValueError, match=message):
        make_metric("RaptorAccuracy").compute(predictions=predictions, references=references, **options)


@pytest.mark.parametrize("definition", R2_DEFINITIONS)
def test_fidelity_equals_the_streaming_sums(make_metric, definition):
    student, teacher = token_vectors()
    result = make_metric("RaptorFidelity").compute(predictions=student, references=teacher, definition=definition)
    sums = token_sums(torch.tensor(student)[None], torch.tensor(teacher)[None], with_ols=True)
    expected = {"r2": r2_from_sums(sums, definition), "cosine": cosine_from_sums(sums), "n_scored": 40}
    assert result == pytest.approx(expected, abs=1e-12)
    assert [type(value) for value in result.values()] == [float, float, int]


def test_fidelity_equals_scikit_learn_by_default(make_metric):
    student, teacher = token_vectors()
    metric = make_metric("RaptorFidelity")
    for rows in (slice(0, 15), slice(15, 40)):
        metric.add_batch(predictions=student[rows], references=teacher[rows])
    assert metric.compute()["r2"] == pytest.approx(
        r2_score(teacher, student, multioutput="variance_weighted"), abs=1e-12
    )


def test_fidelity_takes_bfloat16(make_metric):
    student, teacher = (torch.tensor(vectors).bfloat16() for vectors in token_vectors())
    result = make_metric("RaptorFidelity").compute(predictions=student, references=teacher)
    expected = r2_score(teacher.double(), student.double(), multioutput="variance_weighted")
    assert result["r2"] == pytest.approx(expected, abs=1e-12)


def test_fidelity_without_a_value_is_null_in_strict_json(make_metric):
    result = make_metric("RaptorFidelity").compute(predictions=[[1.0, 2.0]], references=[[1.0, 3.0]])
    assert json.loads(json.dumps(result, allow_nan=False))["r2"] is None
    assert result["n_scored"] == 1


@pytest.mark.parametrize(
    ("predictions", "references", "options", "message"),
    [
        ([[1.0, 2.0], [1.0]], [[1.0, 2.0], [1.0]], {}, r"vectors of \[1, 2\] features; pass one or more"),
        ([[1.0, 2.0]], [[1.0]], {}, r"vectors of \[1, 2\] features"),
        ([], [], {}, r"vectors of \[\] features"),
        ([[1.0], [2.0]], [[1.0], [2.0]], {"definition": "adjusted"}, "are not all R2 definitions"),
    ],
)
def test_fidelity_refuses_wrong_vectors(make_metric, predictions, references, options, message):
    with pytest.raises(ValueError, match=message):
        make_metric("RaptorFidelity").compute(predictions=predictions, references=references, **options)


def test_names_are_listed_and_unknown_ones_refused():
    assert {"RaptorAccuracy", "RaptorDepth", "RaptorFidelity", "RaptorMeanIoU"} <= set(dir(raptor_hf.metrics))
    with pytest.raises(AttributeError, match="has no attribute 'RaptorLoss'; it has RaptorAccuracy, RaptorDepth"):
        raptor_hf.metrics.RaptorLoss  # noqa: B018


def test_mean_iou_is_that_of_the_streaming_sums(make_metric):
    rng = np.random.default_rng(0)
    predictions, labels = rng.integers(0, 3, (2, 4, 5, 6))
    labels[:, 0] = 255
    metric = make_metric("RaptorMeanIoU")
    for rows in (slice(0, 3), slice(3, 4)):
        metric.add_batch(predictions=predictions[rows], references=labels[rows])
    scores = SegmentationScores(4)
    scores.update(torch.tensor(predictions), torch.tensor(labels))
    assert metric.compute(num_classes=4) == scores.compute()
    ragged = {"predictions": [[[0, 1]], [[1], [0]]], "references": [[[0, 1]], [[1], [1]]]}  # maps of two sizes
    assert make_metric("RaptorMeanIoU").compute(**ragged, num_classes=2)["iou"] == pytest.approx([1 / 2, 2 / 3])
    with pytest.raises(ValueError, match="num_classes=0"):
        make_metric("RaptorMeanIoU").compute(**ragged)


def test_depth_is_that_of_the_streaming_sums(make_metric):
    rng = np.random.default_rng(0)
    predictions, labels = rng.uniform(1, 9, (2, 4, 5, 6))
    labels[:, 0] = 0
    scores = DepthScores(DepthRange(maximum=8.0, crop="none"))
    scores.update(torch.tensor(predictions), torch.tensor(labels))
    result = make_metric("RaptorDepth").compute(predictions=predictions, references=labels, maximum=8.0, crop="none")
    assert result == pytest.approx(scores.compute(), rel=1e-12)
    with pytest.raises(ValueError, match="the Eigen crop is defined for 480 x 640"):
        make_metric("RaptorDepth").compute(predictions=predictions, references=labels)
