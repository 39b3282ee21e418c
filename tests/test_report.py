"""Results as strict JSON, as a table and as a page: what goes in comes out, and nothing else."""

import base64
import dataclasses
import enum
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import raptor_hf
from raptor_hf import report
from raptor_hf.report import environment, read_json, summary_rows, to_plain, write_json, write_report

NAN = float("nan")
VOID = {"meta", "img", "br", "link", "input"}


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


class Page(HTMLParser):
    """Text, tags with their attributes, cells by row, and whether every tag is closed."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.rows, self.text = [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        self.text += data

    def attributes(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def sections(self):
        return [attributes["id"] for attributes in self.attributes("section")]


def raptor(name, schedule, last, **fields):
    curve = np.linspace(1.0, last, 4)
    return {
        "name": name, "path": f"{name}/model", "num_blocks": max(schedule) + 1, "block_schedule": schedule,
        "num_parameters": 500_000 * (max(schedule) + 1), "seeds": (0, 1),
        "fidelity": {
            "r2": {"all": curve, "cls": curve - 0.1, "patch": [NAN] * 4}, "cosine": {"all": torch.tensor(curve)},
            "num_images": 1797, "definition": "variance_weighted",
        },
        "training": {
            "preset": "recommended", "steps": np.int64(40), "seconds": 12.5, "student": {"init": "middle"},
            "history": [{"step": step, "loss": 1.0 / step} for step in range(10, 50, 10)],
        },
        **fields,
    }  # fmt: skip


def make_results():
    return {
        "format": 1,
        "title": "Digits & <friends>",
        "command": "raptor-hf quickstart --output-dir /home/somebody/runs/digits --seed 7",
        "seed": 7,
        "environment": {"python": "3.11.9", "accelerator": None},
        "teacher": {
            "name": "/home/somebody/teachers/digits-vit", "model_type": "vit", "num_layers": 4, "hidden_size": 32,
            "num_parameters": 2_000_000,
        },
        "dataset": {"name": "digits", "num_train": 1437, "num_test": 360, "num_skipped": 3},
        "phases": {
            "tokens": "cls", "num_images": 1437, "similarity": np.eye(4),
            "partitions": {
                "2": {"block_schedule": [0, 0, 1, 1], "repeats": [2, 2], "score": 3.25, "method": "dp"},
                "3": {"block_schedule": [0, 1, 0, 2], "repeats": [2, 1, 1], "score": NAN, "method": "given"},
            },
        },
        "models": [raptor("raptor-k2", [0, 0, 1, 1], 0.8), raptor("<b>&", [0, 1, 0, 1], 0.6)],
        "probe": {
            "task": "image-classification", "protocol": {"epochs": 20, "augment": False},
            "results": {
                "teacher": {"accuracy": [0.9, 0.92], "mean": 0.91, "std": 0.0125},
                "raptor-k2": {"accuracy": [0.88, 0.9], "mean": 0.89, "std": 0.0137, "retained": 0.978},
                "ViT-S": {"accuracy": [0.5], "mean": 0.5, "std": None},
            },
        },
        "timings": {"teacher": 41.25},
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of everything, written once."""
    path = tmp_path_factory.mktemp("run")
    write_report(path, make_results())
    return path


@pytest.fixture(scope="module")
def page(folder):
    return Page(folder / "report.html")


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
    with pytest.raises(ValueError, match=r"results\.json is no strict JSON \(.+\); write it again with write_json"):
        read_json(tmp_path / "results.json")


def test_reading_a_missing_file_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.json is no file; pass the results\.json of a finished run"):
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
        raise report.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(report.importlib.metadata, "version", missing)
    monkeypatch.delitem(report.sys.modules, "accelerate", raising=False)
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    monkeypatch.setattr(report.platform, "processor", lambda: "")
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
    results = {"models": [{"name": "a", "num_blocks": 2, "fidelity": {"r2": {"all": [0.5, None, 0.75]}}}]}
    assert summary_rows(results) == (["Model", "Blocks", "Last-layer R²"], [["a", "2", "0.750"]])
    results["probe"] = {"results": {"teacher": {"mean": 0.5}}}
    assert summary_rows(results)[1][0] == ["teacher", "–", "50.00", "–"]


def test_page_is_well_formed_and_loads_nothing(page, folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    names = {name for name, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "svg"}
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.attributes("meta")
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.attributes("img"))
    assert all(image["alt"] for image in page.attributes("img"))
    assert "url(" not in text
    assert "@import" not in text
    loading = [value for name, attributes in page.tags for value in attributes.values() if name != "a"]
    assert not [value for value in loading if value and "http" in value]
    anchors = {link["href"][1:] for link in page.attributes("a") if link["href"].startswith("#")}
    assert anchors == set(page.sections)


def test_page_has_every_section_and_figure(page, folder):
    assert page.sections == [
        "results", "phases", "fidelity", "accuracy", "training", "environment", "load-the-model", "data",
    ]  # fmt: skip
    names = ["schedule", "similarity", "r2", "r2_groups", "cosine", "accuracy", "training_1", "training_2"]
    assert sorted(file.name for file in (folder / "figures").iterdir()) == sorted(f"{name}.png" for name in names)
    for name, image in zip(names, page.attributes("img"), strict=True):
        content = (folder / "figures" / f"{name}.png").read_bytes()
        assert base64.b64decode(image["src"].partition(",")[2]) == content
        with Image.open(folder / "figures" / f"{name}.png") as picture:
            assert picture.width == int(1.5 * int(image["width"]))


def test_page_shows_what_the_results_hold(page):
    _, rows = summary_rows(make_results())
    rows[0][0] = "digits-vit (teacher)"
    expected = [
        *rows,
        ["2", "1-2 | 3-4", "3.25", "dp"],
        ["3", "1 (block 0) | 2 (block 1) | 3 (block 0) | 4 (block 2)", "–", "given"],
        ["teacher", "90.00", "92.00"], ["ViT-S", "50.00", "–"],
        ["epochs", "20"], ["augment", "false"],
        ["Setting", "raptor-k2", "<b>&"], ["steps", "40", "40"], ["seconds", "12.5", "12.5"], ["seeds", "0, 1", "0, 1"],
        ["student", "init: middle", "init: middle"],
        ["seed", "7"], ["python", "3.11.9"], ["accelerator", "–"], ["teacher", "41.25"],
        ["name", "digits"], ["num_train", "1437"], ["num_test", "360"], ["num_skipped", "3"],
    ]  # fmt: skip
    assert [row for row in expected if row not in page.rows] == []
    assert "tokens: cls, mean over 1,437 images" in page.text
    assert "R² (variance_weighted) with the teacher by layer, all tokens, measured on 1,797 images" in page.text
    assert 'RaptorModel.from_pretrained("raptor-k2/model")  # raptor-k2' in page.text


def test_names_are_text_not_markup(page, folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;" in text
    assert page.text.startswith("\n\n\nDigits & <friends>\n")


def test_no_absolute_path_is_shown(page, folder):
    assert "raptor-hf quickstart --output-dir digits --seed 7" in page.text
    assert "somebody" not in page.text
    assert str(folder) not in page.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("facebook/dinov2-base", "facebook/dinov2-base"),
        ("~/data/flowers", "flowers"),
        (r"C:\Users\me\flowers", "flowers"),
        ("--data=/mnt/a/b '/mnt/c/d e'", "--data=b 'd e'"),
        ("https://host/a/b", "https://host/a/b"),
        ("m / s", "m / s"),
        ("{folder}/k2/model", "k2/model"),
    ],
)
def test_folders_of_absolute_paths_are_left_out(text, shown, tmp_path):
    path = write_report(tmp_path, {"format": 1, "command": text.format(folder=tmp_path)})
    assert f"<code>{shown}</code>".replace("'", "&#39;") in path.read_text(encoding="utf-8")


def test_report_of_nothing_has_no_sections(tmp_path):
    page = Page(write_report(tmp_path / "new", {"format": 1}))
    assert page.sections == []
    assert page.rows == []
    assert "Raptor report" in page.text
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("part", "sections"),
    [
        ({"seed": 0}, ["environment"]),
        ({"timings": {"a": 1.0}}, ["environment"]),
        ({"dataset": {"name": "digits"}}, ["data"]),
        ({"teacher": {"name": "vit"}}, ["results"]),
        ({"phases": {"partitions": {"1": {"block_schedule": [0, 0]}}}}, ["phases"]),
        ({"models": [{"name": "a", "path": "model"}]}, ["results", "load-the-model"]),
        ({"models": [{"name": "a", "fidelity": {"r2": {"all": [None]}}}]}, ["results"]),
        ({"models": [{"name": "a", "training": {"history": [{"epoch": 1.0}]}}]}, ["results"]),
        ({"models": [{"name": "a", "training": {"steps": 3}}]}, ["results", "training"]),
        ({"probe": {"results": {"a": {"mean": None}}}}, ["results"]),
        ({"probe": None, "models": [], "phases": {}, "environment": {}, "command": ""}, []),
    ],
)
def test_sections_without_data_are_absent(part, sections, tmp_path):
    page = Page(write_report(tmp_path, {"format": 1, **part}))
    assert page.sections == sections
    assert not page.attributes("img")


def test_phase_boundaries_are_drawn_where_all_models_share_them(tmp_path, monkeypatch):
    seen = []
    original = report.plots.layer_curves_figure
    monkeypatch.setattr(
        report.plots, "layer_curves_figure", lambda *args, **kw: seen.append(kw["boundaries"]) or original(*args, **kw)
    )
    fidelity = {"fidelity": {"r2": {"all": [0.5] * 4}}, "training": None}
    one, other = raptor("a", [0, 0, 1, 1], 0.5, **fidelity), raptor("b", [0, 0, 0, 1], 0.5, **fidelity)
    write_report(tmp_path, {"format": 1, "models": [one]})
    write_report(tmp_path, {"format": 1, "models": [one, other]})
    assert seen == [[2], []]


def test_report_is_the_same_from_memory_and_from_file_and_every_time(folder, tmp_path):
    path = write_report(tmp_path, read_json(write_json(tmp_path / "results.json", make_results())))
    assert path == tmp_path / "report.html"
    assert path.read_bytes() == (folder / "report.html").read_bytes()


@pytest.mark.parametrize("results", [{}, {"format": 2}])
def test_unknown_formats_are_refused(results, tmp_path):
    with pytest.raises(ValueError, match=r"results have format (None|2), not 1; run the command again"):
        write_report(tmp_path, results)
    assert list(tmp_path.iterdir()) == []


def test_models_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"models \['a', 'a'\] do not all have their own name; rename one of a pair"):
        write_report(tmp_path, {"format": 1, "models": [{"name": "a"}, {"name": "a"}]})
