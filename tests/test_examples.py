"""The scripts in `examples/`, on small data: what a reader runs first."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

import dense_sets
from hub_server import Hub
from raptor_hf import RaptorForImageClassification, RaptorModel
from raptor_hf.results import read_json
from raptor_hf.vit_training import digits_processor

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def folder(make_model, tmp_path):
    """A Raptor for digits, untrained."""
    make_model(jittered=False, image_size=16, patch_size=4).save_pretrained(tmp_path / "raptor")
    digits_processor().save_pretrained(tmp_path / "raptor")
    return tmp_path / "raptor"


@pytest.fixture
def tuning(monkeypatch):
    spec = importlib.util.spec_from_file_location("fine_tune", EXAMPLES / "03_fine_tune.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fine_tune", module)
    spec.loader.exec_module(module)
    return module


def training(folder, **options):
    return TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True, **options,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # PEFT's own use of transformers
@pytest.mark.parametrize("method", ["full", "linear", "lora"])
def test_fine_tuning_trains_what_it_says(method, folder, tuning, tmp_path):
    before = RaptorModel.from_pretrained(folder).state_dict()
    args = tuning.FineTuneArguments(model=str(folder), method=method, max_images=32, rank=2)
    model, metrics = tuning.fine_tune(args, training(tmp_path / "run"))
    assert 0 <= metrics["eval_accuracy"] <= 1
    saved, report = RaptorForImageClassification.from_pretrained(tmp_path / "run" / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert saved.config.id2label[3] == "3"
    for name, value in model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name
    changed = {name for name, value in before.items() if not torch.equal(saved.raptor.state_dict()[name], value)}
    matrices = {name for name in before if name.split(".")[-2] in ("qkv", "proj", "fc1", "fc2") and "weight" in name}
    if method == "linear":
        assert not changed
    elif method == "lora":
        assert changed == matrices
        adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
        pairs = [name for name in adapter if "lora_A" in name]
        assert len(pairs) == 4 * 2  # four matrices of two blocks, however often they are applied
    else:
        assert matrices < changed
        assert not any(name.startswith(("embeddings.", "layernorm.")) for name in changed)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_classifier_of_other_classes_gets_a_new_head(tuning, make_model, tmp_path):
    make_model(RaptorForImageClassification, num_labels=3, image_size=16, patch_size=4).save_pretrained(tmp_path / "a")
    digits_processor().save_pretrained(tmp_path / "a")
    args = tuning.FineTuneArguments(model=str(tmp_path / "a"), method="linear", max_images=16)
    model, _ = tuning.fine_tune(args, training(tmp_path / "run"))
    assert model.config.num_labels == 10


def test_unknown_method(folder, tuning, tmp_path):
    with pytest.raises(ValueError, match="method='all' is unknown; use one of full, linear, lora"):
        tuning.fine_tune(tuning.FineTuneArguments(model=str(folder), method="all"), training(tmp_path))


def test_fine_tuning_on_two_processes(folder, tmp_path):
    """LoRA under DDP, launched as the script says, with the configuration of two processes."""
    environment = Hub.environment(None, tmp_path / "home", token=None, endpoint="http://127.0.0.1:9")
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "accelerate" / "two_gpus.yaml",
        EXAMPLES / "03_fine_tune.py", "--model", folder, "--max_images", "32", "--output_dir", tmp_path / "run",
        "--max_steps", "2", "--per_device_train_batch_size", "4", "--report_to", "none", "--save_strategy", "no",
    ]  # fmt: skip
    run = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False,
        env=environment | {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert "lora: top-1" in run.stdout
    assert "'epoch': '0.5'" in run.stdout  # 2 steps of 4 images on 2 processes are half of 32
    assert RaptorForImageClassification.from_pretrained(tmp_path / "run" / "model").config.num_labels == 10


def test_the_way_over_the_hub(folder, tmp_path):
    with Hub() as hub:
        run = subprocess.run(
            [sys.executable, EXAMPLES / "04_hub_round_trip.py", str(folder), "alice/raptor", "--max-steps", "2"],
            capture_output=True, text=True, check=False, env=hub.environment(tmp_path / "home"),
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        repo = hub.repos["alice/raptor"]
    assert repo.private
    assert "the same states bit for bit, with raptor_hf and without it" in run.stdout
    assert "history of main: Upload Raptor <- initial commit" in run.stdout
    assert "history of tuned: LoRA on digits, merged <- Upload Raptor <- initial commit" in run.stdout
    assert "hf_alice" not in run.stdout + run.stderr


def test_dynamics_print_what_each_token_group_does(make_teacher, tmp_path):
    teacher = make_teacher(image_size=16, patch_size=4)
    teacher.model.save_pretrained(tmp_path)
    digits_processor().save_pretrained(tmp_path)
    command = [sys.executable, str(EXAMPLES / "05_dynamics.py"), str(tmp_path), "digits", "--max_images", "20"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for group in ("cls", "registers", "patch"):
        assert f"{group}: " in output
        assert f"{group} perturbed by a tenth" in output


@pytest.mark.parametrize("name", ["imagenet", "ade20k", "nyuv2"])
def test_evaluations_measure_by_the_papers_protocol(name, folder, tmp_path):
    make = {"ade20k": dense_sets.make_ade, "nyuv2": dense_sets.make_nyu_csv}
    data = make[name](tmp_path / "set") if name in make else "digits"
    options = {"imagenet": ["--eval-split", "test"], "ade20k": [], "nyuv2": ["--crop", "none"]}[name]
    command = [
        sys.executable, str(EXAMPLES / f"evaluate_{name}.py"), str(folder), "--dataset", str(data), "--image-size",
        "16", "--max-images", "8", "--num-epochs", "1", "--batch-size", "4", "--seeds", "1", *options,
        "--output-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert {"imagenet": "Top-1 (%)", "ade20k": "mIoU (%)", "nyuv2": "RMSE (m)"}[name] in output
    assert (tmp_path / "run" / "table.tex").is_file()
    protocol = read_json(tmp_path / "run" / "results.json")["probe"]["protocol"]
    assert protocol["select"] == "best"
    assert (
        name == "imagenet" or (protocol["eval_size"] == "input") == (name == "ade20k") or protocol["align"] == "paper"
    )


def test_ablations_fill_the_papers_table(make_teacher, tmp_path):
    teacher = make_teacher(image_size=16, patch_size=4)
    teacher.model.save_pretrained(tmp_path / "teacher")
    digits_processor().save_pretrained(tmp_path / "teacher")
    command = [
        sys.executable, str(EXAMPLES / "06_ablations.py"), str(tmp_path / "teacher"), "--image_size", "16",
        "--num_blocks", "2", "--max_steps", "2", "--output_dir", str(tmp_path / "run"), "--distill_options",
        "--per_device_train_batch_size 4 --no_bf16 --dataloader_num_workers 0 --max_images 16",
        "--probe_options", "--augment none --num_epochs 1 --max_images 16 --num_seeds 2",
    ]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    table = (tmp_path / "run" / "table.md").read_text(encoding="utf-8")
    assert output.endswith(table + "\n")
    names = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert names[1:] == ["1-tf-only", "2-ar-anneal", "3-depth-scale", "4-cls-weight", "5-stage-2", "6-probe-tuning"]
    again = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert again.endswith(table + "\n")
