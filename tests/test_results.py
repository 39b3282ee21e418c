"""What a run measured as strict JSON and as a table: what goes in comes out, and no private path."""

import dataclasses
import enum
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import raptor_hf
from raptor_hf import results
from raptor_hf.results import (
    dataset_record,
    environment,
    new_results,
    read_json,
    summary_rows,
    teacher_record,
    to_plain,
    write_json,
)
from raptor_hf.vision_models import public_name
from sample_results import NAN, make_results


class Colour(enum.Enum):
    """An enum of text."""

    RED = "red"


@dataclasses.dataclass
class Plain:
    """A dataclass without `to_dict`."""

    value: float
    values: tuple


@dataclasses.dataclass
class Measurement:
    """A dataclass that has one."""

    value: float

    def to_dict(self):
        return {"measured": np.float32(self.value)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (NAN, None),
        (float("-inf"), None),
        (np.float64("nan"), None),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (True, True),
        (np.array([[1.0, np.inf]]), [[1.0, None]]),
        (torch.tensor([1.5, NAN], dtype=torch.bfloat16), [1.5, None]),
        (torch.tensor(2, requires_grad=False), 2),
        (torch.ones(2, requires_grad=True), [1.0, 1.0]),
        ((1, (2, "x")), [1, [2, "x"]]),
        (range(2), [0, 1]),
        (Path("a") / "b", os.path.join("a", "b")),
        (torch.float16, "torch.float16"),
        (torch.device("cpu"), "cpu"),
        (Colour.RED, "red"),
        (Plain(NAN, (np.int8(1),)), {"value": None, "values": [1]}),
        (Measurement(0.25), {"measured": 0.25}),
        ({1: {"iou": np.array([0.5, np.nan])}, None: None}, {"1": {"iou": [0.5, None]}, "None": None}),
    ],
)
def test_values_become_strict_json(value, expected, tmp_path):
    assert to_plain(value) == expected
    assert type(to_plain(value)) is type(expected)
    assert read_json(write_json(tmp_path / "value.json", {"value": value}))["value"] == expected


@pytest.mark.parametrize("value", [{1, 2}, 1j, object(), Measurement, np.array([1j])])
def test_values_without_a_json_form_are_refused(value):
    with pytest.raises(TypeError, match="has no JSON form; make it a number, text, list or mapping"):
        to_plain({"value": [value]})


def test_keys_that_would_fall_together_are_refused():
    with pytest.raises(ValueError, match=r"keys \[1, '1'\] are not unique as text, .* rename one of a pair"):
        to_plain({1: "a", "1": "b"})


def test_files_are_utf8_and_made_with_their_folder(tmp_path):
    path = write_json(tmp_path / "new" / "folder" / "results.json", {"σ": 0.1})
    assert path.read_text(encoding="utf-8") == '{\n  "σ": 0.1\n}\n'
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_the_old_file_survives_what_goes_wrong(tmp_path, monkeypatch):
    path = write_json(tmp_path / "results.json", {"run": 1})
    with pytest.raises(TypeError, match="has no JSON form"):
        write_json(path, {"run": 2, "bad": {1}})
    assert read_json(path) == {"run": 1}

    def fail(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"run": 2})
    assert read_json(path) == {"run": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": [Infinity]}', '{"a": 1', ""])
def test_reading_refuses_what_is_no_strict_json(text, tmp_path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match=r"results\.json is no strict JSON \(.+\); write or save it again"):
        read_json(tmp_path / "results.json")


def test_reading_a_missing_file_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.json is no file; pass one that a finished run or save_pretrained"):
        read_json(tmp_path / "absent.json")


def test_environment_has_versions_and_hardware_but_no_names_or_paths():
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["raptor_hf"] == raptor_hf.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", found["transformers"])
    assert found["cpu_cores"] == os.cpu_count()
    assert found["torch_threads"] == torch.get_num_threads()
    assert to_plain(found) == found
    text = json.dumps(found)
    for private in (os.uname().nodename, str(Path.home()), str(Path.cwd())):
        assert private not in text
    assert not re.search(r'"[/~]|[A-Z]:\\', text)


def test_environment_without_the_usual_sources(monkeypatch):
    def missing(package):
        raise results.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(results.importlib.metadata, "version", missing)
    monkeypatch.delitem(results.sys.modules, "accelerate", raising=False)
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    monkeypatch.setattr(results.platform, "processor", lambda: "")
    found = environment()
    assert found["accelerate"] is None
    assert found["cpu"] is None


@pytest.mark.parametrize(("kind", "expected"), [("cuda", "Some GPU"), ("mps", "mps"), (None, None)])
def test_environment_names_the_accelerator(kind, expected, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert environment()["accelerator"] == expected


def test_summary_is_one_row_per_model():
    header, rows = summary_rows(make_results())
    assert header == [
        "Model", "Blocks", "Schedule", "Parameters", "Of teacher", "Top-1 (%)", "Retained", "Mean R²",
        "Last-layer R²", "Mean cosine",
    ]  # fmt: skip
    irregular = "1 (block 0) | 2 (block 1) | 3 (block 0) | 4 (block 1)"
    assert rows == [
        ["/home/somebody/teachers/digits-vit (teacher)", "4", "–", "2,000,000", "–", "91.00 ± 1.25", *"––––"],
        ["raptor-k2", "2", "1-2 | 3-4", "1,000,000", "50.0 %", "89.00 ± 1.37", "97.8 %", "0.900", "0.800", "0.900"],
        ["<b>&", "2", irregular, "1,000,000", "50.0 %", "–", "–", "0.800", "0.600", "0.800"],
        ["ViT-S", "–", "–", "–", "–", "50.00", "–", "–", "–", "–"],
    ]


def test_summary_leaves_out_columns_without_values():
    assert summary_rows({"format": 1}) == (["Model"], [])
    partial = {"models": [{"name": "a", "num_blocks": 2, "fidelity": {"r2": {"all": [0.5, None, 0.75]}}}]}
    assert summary_rows(partial) == (["Model", "Blocks", "Last-layer R²"], [["a", "2", "0.750"]])
    partial["probe"] = {"results": {"teacher": {"mean": 0.5}}}
    assert summary_rows(partial)[1][0] == ["teacher", "–", "50.00", "–"]


def test_records_have_no_private_paths(teacher, digits, tmp_path):
    folder = tmp_path / "my-teacher"
    folder.mkdir()
    assert public_name(str(folder)) == "my-teacher"
    assert public_name("org/model") == "org/model"
    teacher.name_or_path = str(folder)
    record = teacher_record(teacher)
    assert record["name"] == "my-teacher"
    assert record["num_layers"] == 4
    assert str(tmp_path) not in json.dumps([record, new_results("t", "c", 0), dataset_record(digits, None)])


def test_tokens_are_in_no_results():
    for flag in ("--hub-token hf_secret", "--hub_token=hf_secret", "--token hf_secret"):
        command = new_results("t", f"raptor-hf distill a {flag} --seed 1", 0)["command"]
        assert "hf_secret" not in command
        assert command.endswith("--seed 1")


def test_dataset_record_counts_what_was_left_out(digits):
    digits.images.num_skipped = 2
    assert dataset_record(digits, digits) == {
        "name": "digits",
        "num_train": 8,
        "num_test": 8,
        "num_skipped": 4,
    }
