"""Table 1: every number of a probe comes out where it belongs, in four formats."""

import csv
import json

import pandas as pd
import pytest

from raptor_hf.probe_tables import probe_records, probe_table, probes_of, write_tables


def size(num_blocks, num_layers, parameters, flops, image_size=(224, 224)):
    return {
        "num_blocks": num_blocks, "num_layers": num_layers, "num_parameters": parameters, "flops": flops,
        "image_size": list(image_size),
    }  # fmt: skip


@pytest.fixture
def results():
    return {
        "models": [{"name": "k3", "num_blocks": 3, "num_parameters": 27}],
        "probes": [
            {
                "task": "image-classification", "dataset": "imagenet", "metric": "accuracy",
                "results": {
                    "teacher": {
                        "accuracy": [0.83, 0.85], "mean": 0.84, "std": 0.0141, "num_scored": 50,
                        "size": size(None, 12, 86_580_480, 46.9e9),
                    },
                    "k3": {"accuracy": [0.83], "mean": 0.83, "std": None, "retained": 0.988, "num_scored": 50},
                    "S": {"accuracy": [0.8], "mean": 0.8, "size": size(None, 12, 22_000_000, 11e9)},
                },
            },
            {
                "task": "depth-estimation", "dataset": "nyu", "metric": "rmse",
                "results": {
                    "teacher": {"rmse": [0.4], "mean": 0.4, "size": size(None, 12, 86_580_480, 250e9, (490, 644))},
                    "k3": {"rmse": [0.5], "mean": 0.5},
                },
            },
        ],
    }  # fmt: skip


def test_records(results):
    records = probe_records(results)
    assert [(record["model"], record["dataset"]) for record in records] == [
        ("teacher", "imagenet"), ("k3", "imagenet"), ("S", "imagenet"), ("teacher", "nyu"), ("k3", "nyu"),
    ]  # fmt: skip
    teacher, raptor, small, _, depth = records
    assert (teacher["flops"], teacher["image_height"], teacher["num_layers"]) == (46.9e9, 224, 12)
    assert (teacher["num_seeds"], teacher["num_scored"], teacher["retained"]) == (2, 50, 1.0)
    assert (raptor["num_blocks"], raptor["num_parameters"], raptor["retained"]) == (3, 27, 0.988)  # as the run has it
    assert small["retained"] == pytest.approx(0.8 / 0.84)
    assert depth["retained"] == pytest.approx(0.4 / 0.5)  # an error: less is better


def test_table(results):
    header, rows = probe_table(probe_records(results))
    assert header == [
        "Model", "Blocks", "Parameters", "GFLOPs (224 × 224)", "imagenet Top-1 (%)", "Retained", "nyu RMSE (m)",
        "Retained",
    ]  # fmt: skip
    assert rows == [
        ["teacher", "12 layers", "86,580,480", "46.90", "84.00 ± 1.41", "100.0 %", "0.400", "100.0 %"],
        ["k3", "3", "27", "–", "83.00", "98.8 %", "0.500", "80.0 %"],
        ["S", "12 layers", "22,000,000", "11.00", "80.00", "95.2 %", "–", "–"],
    ]


def test_columns_without_a_value_and_different_image_sizes():
    results = {"probe": {"results": {"a": {"mean": 0.5, "size": size(2, 4, None, 1e9)}}}}
    assert probe_table(probe_records(results))[0] == ["Model", "Blocks", "GFLOPs (224 × 224)", "Top-1 (%)"]
    results["probe"]["results"]["b"] = {"mean": 0.5, "size": size(2, 4, None, 1e9, (98, 98))}
    assert probe_table(probe_records(results))[0][2] == "GFLOPs"  # not of one size


def test_probe_without_an_outcome_is_none():
    assert probes_of({"probe": {"task": "depth-estimation", "results": {}}}) == probes_of({}) == []
    assert probe_records({"probe": None}) == []


def test_files(results, tmp_path):
    results["probes"][0]["results"]["a|b_c & 5 %"] = {"mean": 0.25, "accuracy": [0.25]}
    records = probe_records(results)
    paths = {path.suffix: path for path in write_tables(tmp_path / "new", records)}
    assert json.loads(paths[".json"].read_text()) == records
    frame = pd.read_csv(paths[".csv"])
    assert frame["mean"].tolist() == [record["mean"] for record in records]
    assert frame["flops"].dtype == float
    with paths[".csv"].open(newline="") as file:
        assert [row["model"] for row in csv.DictReader(file)] == [record["model"] for record in records]
    lines = paths[".md"].read_text().splitlines()
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    assert lines[-1].startswith(r"| a\|b_c & 5 % |")
    latex = paths[".tex"].read_text()
    assert r"84.00 $\pm$ 1.41" in latex
    assert r"a|b\_c \& 5 \%" in latex
    assert latex.count(r"\\") == 5
    assert "–" not in latex


def test_nothing_to_write(tmp_path):
    with pytest.raises(ValueError, match=r"no probe to make a table of; run raptor-hf probe"):
        write_tables(tmp_path, [])
    assert not list(tmp_path.iterdir())
