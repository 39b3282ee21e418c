"""The recipes: each can be planned by `--dry_run`, says what the paper says, and has the card of its plan."""

import types
from pathlib import Path

import pytest
from transformers import AutoConfig

from raptor_hf import DistillationArguments
from raptor_hf.cli import main
from raptor_hf.cli.common import ImageArguments, TeacherArguments
from raptor_hf.cli.parsing import parse
from raptor_hf.cli.student import StudentArguments
from raptor_hf.data import dinov2_processor
from raptor_hf.results import read_json

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
ABLATIONS = sorted((ROOT / "examples" / "recipes" / "ablations").glob("*.yaml"))
SCHEDULES = {"k2": "1-7 | 8-12", "k3": "1-7 | 8-10 | 11-12", "k4": "1-4 | 5-7 | 8-10 | 11-12"}
NUM_TRAIN = 1_281_167  # images of ImageNet-1k


@pytest.fixture
def teacher(make_teacher, tmp_path):
    """A teacher of as many layers as DINOv2-B, configuration alone."""
    folder = tmp_path / "teacher"
    make_teacher(num_hidden_layers=12).model.config.save_pretrained(folder)
    dinov2_processor().save_pretrained(folder)
    return folder


def arguments(recipe):
    """Student, teacher, images and training of a recipe."""
    types = [StudentArguments, TeacherArguments, ImageArguments, DistillationArguments]
    return parse("distill", types, [str(recipe), "--use-cpu"], ["teacher"])


def plan(recipe, teacher, *options):
    """Exit code of a dry run with a small teacher."""
    return main(["distill", str(recipe), "--teacher", str(teacher), "--use-cpu", "--dry-run", *options])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_planned(recipe, teacher, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    assert plan(recipe, teacher, "--dataset", "digits", "--per-device-train-batch-size", "2") == 0
    printed = capsys.readouterr().out
    assert SCHEDULES[recipe.stem.split("-")[2]] in printed
    assert "224 x 224 pixels, 261 tokens" in printed
    assert "digits, 1,437 to train on" in printed
    steps = {"research": ["312,500", "312,500"], "recommended": ["200,180", "600,540"]}
    row = next(line for line in printed.splitlines() if line.startswith("| steps "))
    assert [cell.strip() for cell in row.split("|")[2:4]] == steps.get(recipe.stem.split("-")[-1], ["400,360"] * 2)
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_what_the_paper_says(recipe):
    student, source, images, args = arguments(recipe)
    assert source.teacher == "facebook/dinov2-with-registers-base"
    assert (images.dataset, images.image_size, args.per_device_train_batch_size) == ("ILSVRC/imagenet-1k", 224, 64)
    assert sum(student.repeats) == 12
    assert student.name == f"raptor-{recipe.stem}"
    assert args.output_dir == f"runs/{recipe.stem}"
    stages = args.stage_arguments()
    if args.preset == "research":
        assert [stage.max_steps * 64 for stage in stages.values()] == [20_000_000] * 2
        assert stages["blocks"].max_steps * args.warmup_steps == 10_000
    elif args.preset == "paper":
        assert [stage.max_steps // (NUM_TRAIN // 64) for stage in stages.values()] == [20, 20]
        assert stages["blocks"].max_steps * args.warmup_steps == pytest.approx(10_000, rel=1e-3)
    else:
        assert sum(stage.max_steps for stage in stages.values()) == 40 * (NUM_TRAIN // 64)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_has_the_card_of_its_plan(recipe):
    student, source, images, args = arguments(recipe)
    folder = ROOT / "model_cards" / recipe.stem
    config = AutoConfig.from_pretrained(folder)
    assert [config.block_schedule.count(block) for block in range(config.num_blocks)] == student.repeats
    assert (config.hidden_size, config.num_attention_heads, config.patch_size) == (768, 12, 14)
    assert (config.num_register_tokens, config.image_size, config.teacher_name_or_path) == (4, 518, source.teacher)
    assert config.mlp_type == ("swiglu" if args.preset == "research" else "gelu")
    results = read_json(folder / "results.json")
    (model,) = results["models"]
    training = model["training"]
    assert (model["name"], model["planned"], training["steps"]) == (student.name, True, args.max_steps)
    assert (training["preset"], training["bf16"], training["batch_size"]) == (args.preset, args.bf16, 64)
    assert results["dataset"] == {"name": images.dataset}
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.count("Not yet run.") == 2  # fidelity and probes
    assert "It does not exist yet: this is the plan of a run" in card
    assert f"\nraptor-hf distill examples/recipes/{recipe.name}\n" in card


@pytest.mark.parametrize("recipe", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_can_be_planned(recipe, teacher, make_model, tmp_path, capsys):
    options = ["--dataset", "digits", "--per-device-train-batch-size", "2"]
    if recipe.stem == "5-stage-2":
        make_model(block_schedule=[0] * 7 + [1] * 3 + [2] * 2).save_pretrained(tmp_path / "student")
        options += ["--student", str(tmp_path / "student")]
    assert plan(recipe, teacher, *options) == 0
    printed = capsys.readouterr().out
    assert SCHEDULES["k3"] in printed
    assert ("blocks" in printed) != ("end_to_end" in printed)


def test_ablations_are_cumulative():
    rows = [arguments(recipe) for recipe in ABLATIONS]
    assert [row[0].name for row in rows] == [recipe.stem for recipe in ABLATIONS]
    assert [row[3].output_dir for row in rows] == [f"runs/ablations/{recipe.stem}" for recipe in ABLATIONS]
    assert [row[0].depth_scale for row in rows[:4]] == [False, False, True, True]
    assert [row[0].repeats for row in rows[:4]] == [[7, 3, 2]] * 4
    assert rows[4][0].student == "runs/ablations/4-cls-weight/model"
    assert [row[3].stage for row in rows] == ["blocks"] * 4 + ["end_to_end"]
    objectives = [row[3].objective_for("blocks") for row in rows[:4]]
    assert [objective.objective for objective in objectives] == ["teacher_forcing", "hybrid", "hybrid", "hybrid"]
    weights = {"cls": 0.34, "registers": 0.33, "patch": 0.33}
    assert [objective.last_block_weights for objective in objectives] == [None, None, None, weights]
    shared = {(row[1].teacher, row[2].dataset, row[2].image_size, row[3].preset, row[3].max_steps) for row in rows}
    assert shared == {("facebook/dinov2-with-registers-base", "ILSVRC/imagenet-1k", 224, "paper", 400_360)}


def test_a_card_can_be_written_without_a_run(teacher, tmp_path, capsys):
    options = ["--dataset", "digits", "--per-device-train-batch-size", "2", "--card", str(tmp_path / "card")]
    assert plan(RECIPES[0], teacher, *options) == 0
    written = {path.name for path in (tmp_path / "card").iterdir()}
    assert written == {"README.md", "config.json", "results.json", "schedule.png"}
    assert "## How it is to be trained" in (tmp_path / "card" / "README.md").read_text(encoding="utf-8")


def test_phases_that_are_not_known_and_a_cache_are_planned(teacher, tmp_path, capsys):
    argv = ["distill", str(teacher), "--num-blocks", "5", "--max-steps", "10", "--image-size", "28", "--use-cpu"]
    assert main([*argv, "--activation-cache", str(tmp_path / "cache"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "5 blocks, phases are found on the images" in printed
    assert f"{2 * 1437 * 13 * 9 * 32 / 1e6:.3g} MB, at most 100 GB" in printed
    assert not (tmp_path / "cache").exists()
    assert main([*argv, "--streaming", "--dry-run"]) == 0
    assert "digits, a stream" in capsys.readouterr().out


def test_images_of_a_hub_dataset_are_counted_by_its_description(teacher, monkeypatch, capsys):
    import datasets

    splits = {"train": types.SimpleNamespace(num_examples=640)}
    info = types.SimpleNamespace(splits=splits)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *a, **k: types.SimpleNamespace(info=info))
    argv = ["distill", str(teacher), "--repeats", "6", "6", "--image-size", "28", "--use-cpu", "--dry-run",
            "--dataset", "org/photos", "--num-train-epochs", "4", "--blocks-share", "0.5"]  # fmt: skip
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "org/photos, 640 to train on" in printed
    row = next(line for line in printed.splitlines() if line.startswith("| steps "))
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["20", "20"]
    assert main([*argv, "--max-images", "64"]) == 0
    assert "org/photos, 64 to train on" in capsys.readouterr().out
    assert main([*argv, "--train-split", "test"]) == 2
    assert "'org/photos' has no split 'test', only train" in capsys.readouterr().err
    info.splits = None
    assert main(argv) == 2
    assert "the number of images is not known; give the number of steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--teacher", "nobody/nothing"], "teacher 'nobody/nothing' cannot be looked up"),
        (["--dataset", "nobody/nothing"], "'nobody/nothing' is no folder here and cannot be looked up on the Hub"),
        (["--num-blocks", "13"], "--num_blocks 13: a teacher of 12 layers has 1 to 12 blocks"),
        (["--card", "plan", "--no-dry-run"], "--card is the card of a plan; give --dry_run with it"),
    ],
)
def test_what_cannot_be_planned_is_named(options, message, teacher, capsys):
    argv = ["distill", "--teacher", str(teacher), "--use-cpu", "--image-size", "28", "--dry-run", *options]
    assert main(argv) == 2
    assert message in capsys.readouterr().err
