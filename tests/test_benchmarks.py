"""The recipe trials: what a trial file may say, and a run that is not repeated once it is finished."""

import importlib.util
import json
from pathlib import Path

import pytest

from raptor_hf.data import dinov2_processor

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def recipe():
    spec = importlib.util.spec_from_file_location("recipe", FOLDER / "recipe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_trial_changes_what_it_names_and_keeps_the_rest_of_base(recipe, tmp_path):
    path = tmp_path / "trials.yaml"
    path.write_text(
        "base: {training: {learning_rate: 1.0, max_grad_norm: 2.0}, student: {init: middle}}\n"
        "own: {training: {learning_rate: 3.0}}\nbare: {}\npaper: {preset: paper}\n"
    )
    trials = recipe.read_trials(path, None)
    assert trials["own"]["training"] == {"learning_rate": 3.0, "max_grad_norm": 2.0}
    assert trials["own"]["student"] == {"init": "middle"}
    assert trials["bare"]["training"]["learning_rate"] == 1.0
    assert trials["paper"] == {"preset": "paper", "training": {}, "student": {}}  # a preset stands for itself
    assert list(recipe.read_trials(path, ["own"])) == ["own"]
    with pytest.raises(ValueError, match="has no trial other; choose from"):
        recipe.read_trials(path, ["other"])
    path.write_text("own: {lr: 1}\n")
    with pytest.raises(ValueError, match=r"trial 'own' has unknown fields \['lr'\]"):
        recipe.read_trials(path, None)


def test_the_trials_that_ship_are_valid(recipe, make_teacher):
    trials = recipe.read_trials(FOLDER / "recipe.yaml", None)
    teacher = make_teacher(num_hidden_layers=12, hidden_size=64)
    for trial in trials.values():
        preset = trial.get("preset", "recommended")
        recipe.DistillationArguments(output_dir="unused", use_cpu=True, preset=preset, **trial["training"])
        student = {**recipe.MODEL_PRESETS[preset], **trial["student"]}
        recipe.RaptorModel.from_teacher(teacher, trial.get("phases", (5, 4, 3)), **student)


def test_runs_are_measured_once(recipe, make_teacher, tmp_path, capsys, monkeypatch):
    teacher = make_teacher(num_hidden_layers=4, image_size=28)
    teacher.model.save_pretrained(tmp_path / "teacher")
    dinov2_processor(28).save_pretrained(tmp_path / "teacher")
    (tmp_path / "trials.yaml").write_text(
        "muon: {num_blocks: 2, ema: 0.5, growing_horizon: 0.5}\npaper: {preset: paper}\n"
    )
    digits = recipe.load_images
    monkeypatch.setattr(recipe, "load_images", lambda name, split: digits(name, split=split, max_images=40))
    arguments = [
        str(tmp_path / "teacher"), "--image-size", "28", "--steps", "4", "--batch-size", "4", "--num-blocks", "2",
        "--cpu", "--trials", str(tmp_path / "trials.yaml"), "--output-dir", str(tmp_path / "out"),
    ]  # fmt: skip
    assert recipe.main(arguments) == 0
    record = json.loads((tmp_path / "out" / "muon-28px-4-seed0.json").read_text())
    assert record["num_blocks"] == 2
    assert record["fidelity"]["num_images"] == 40
    assert 0 <= record["knn"] <= 1
    # An application multiplies 9 tokens of 32 features: qkv, proj, MLP (12 D^2 a token), attention (2 n D); twice for
    # multiply and add, thrice with the backward pass; four of them, four images, four steps and one that is also
    # teacher-forced. The depth scales' products are the rest.
    expected = 3 * 2 * (9 * 12 * 32**2 + 2 * 9**2 * 32) * 4 * 4 * 5
    assert record["student_flops"] == pytest.approx(expected, rel=0.02)
    (tmp_path / "out" / "muon-28px-4-seed0.json").write_text(json.dumps({**record, "knn": 0.125}))
    assert recipe.main(arguments) == 0
    assert "0.125" in capsys.readouterr().out
    figure = {"fidelity.png", "results.json"}
    assert recipe.main([*arguments, "--summary", str(tmp_path / "summary")]) == 0
    assert {path.name for path in (tmp_path / "summary").iterdir()} == figure
    results = json.loads((tmp_path / "summary" / "results.json").read_text())
    assert next((run["name"], run["steps"], run["knn"]) for run in results["runs"]) == ("muon", 4, 0.125)
    assert set(results["references"]["28px"]) == {"teacher", "random"}
    names = [row[0] for row in recipe.summary_rows(results, 28, 4)]
    assert names == ["teacher", "Raptor, `muon`", "Raptor, `paper`", "random ViT"]
