"""What the README tells a newcomer is run: its Python snippets in order, and its numbers against the recorded run."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raptor_hf.data import dinov2_processor
from raptor_hf.results import summary_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def workspace(make_teacher, tmp_path, monkeypatch):
    """A folder in which the snippets find what they name: a tiny teacher and a folder of photos."""
    teacher = make_teacher(num_hidden_layers=12, image_size=28)
    teacher.model.save_pretrained(tmp_path / "teacher")
    dinov2_processor(28).save_pretrained(tmp_path / "teacher")
    rng = np.random.default_rng(0)
    for split, count in (("train", 24), ("test", 8)):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for index in range(count // 2):
                pixels = rng.integers(0, 255, (36, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / name / f"{index}.png")
    monkeypatch.chdir(tmp_path)


def test_the_python_snippets_run_in_order(workspace):
    assert len(SNIPPETS) == 3
    smaller = {
        '"facebook/dinov2-with-registers-base"': '"teacher"',
        'output_dir="raptor-dinov2-b-k3"': 'output_dir="raptor", use_cpu=True, report_to="none", max_steps=2',
        "per_device_train_batch_size=64": "per_device_train_batch_size=8",
    }
    names: dict = {}
    for snippet in SNIPPETS:
        for long, short in smaller.items():
            snippet = snippet.replace(long, short)
        exec(compile(snippet, "README.md", "exec"), names)
    assert names["model"].config.num_blocks == 3
    assert len(names["outputs"].hidden_states) == 13
    assert names["similarity"].shape == (12, 12)


def test_the_recipes_table_is_the_recorded_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    recipe = importlib.import_module("recipe")
    results = json.loads((ROOT / "examples" / "recipe" / "results.json").read_text())
    rows = recipe.summary_rows(results, 224, 800)
    assert len(rows) == 6
    for row in rows:
        assert "| " + " | ".join(row) + " |" in README
    for preset in ("paper", "research", "recommended"):
        steps = {run["steps"] for run in results["runs"] if run["name"] == preset and run["image_size"] == 98}
        assert steps == {40, 160, 400, 800}


def test_the_results_table_is_the_recorded_runs():
    results = json.loads((ROOT / "examples" / "quickstart" / "results.json").read_text())
    _, rows = summary_rows(results)
    for row in rows:
        line = "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
        assert line in README
    assert results["command"] in README
