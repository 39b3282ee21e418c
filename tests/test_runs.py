"""A distillation as a folder: phases kept, and runs gone on with."""

import json

import pytest
import torch

from raptor_hf import DistillationArguments, RaptorModel
from raptor_hf.phases import Phases
from raptor_hf.runs import discover_phases, distill


def arguments(folder, **options):
    return DistillationArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to="none",
        disable_tqdm=True, loss_scale_images=4, **options,
    )  # fmt: skip


def test_phases_are_searched_once_and_kept(teacher, digits, tmp_path):
    path = tmp_path / "phases.json"
    record = discover_phases(teacher, digits, (2, 3), path)
    assert set(record["partitions"]) == {"2", "3"}
    assert len(record["similarity"]) == 4
    assert record["num_images"] == 8
    kept = json.loads(path.read_text())
    kept["note"] = "kept"
    path.write_text(json.dumps(kept))
    assert discover_phases(teacher, digits, (3,), path)["note"] == "kept"
    assert set(record["groups"]) == {"all", "cls", "registers", "patch"}
    assert "note" not in discover_phases(teacher, digits, (3,), path, tokens="cls")  # another question
    path.write_text(json.dumps({**kept, "num_images": 99}))
    assert discover_phases(teacher, digits, (3,), path)["num_images"] == 8  # other images
    assert discover_phases(teacher, digits, (4,), path)["num_images"] == 8  # not there yet: searched again


def test_distilling_saves_a_model_and_a_record(teacher, digits, tmp_path):
    model, record = distill(teacher, Phases.from_repeats((2, 2)), arguments(tmp_path), digits, digits, name="raptor-k2")
    saved = RaptorModel.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
    assert (tmp_path / "model" / "preprocessor_config.json").is_file()
    assert record["block_schedule"] == [0, 0, 1, 1]
    assert record["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert record["training"]["steps"] == 2
    assert record["fidelity"]["num_images"] == 8
    assert record["training"]["student"]["init"] == "middle"
    json.dumps(record, allow_nan=False)


def test_the_same_call_goes_on_and_changes_nothing_once_done(teacher, digits, tmp_path):
    first, _ = distill(teacher, Phases.from_repeats((2, 2)), arguments(tmp_path), digits, None, name="a")
    again, record = distill(teacher, Phases.from_repeats((2, 2)), arguments(tmp_path), digits, None, name="a")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert record["training"]["steps"] == 2
    assert "fidelity" not in record


@pytest.mark.parametrize(("preset", "mlp_type"), [("paper", "gelu"), ("research", "swiglu")])
def test_the_preset_chooses_the_student_and_a_value_wins(teacher, digits, tmp_path, preset, mlp_type):
    model, _ = distill(
        teacher, Phases.from_repeats((2, 2)), arguments(tmp_path / "a", preset=preset), digits, None, name="a"
    )
    assert model.config.mlp_type == mlp_type
    assert model.config.layerscale_value == 1e-5
    model, record = distill(
        teacher, Phases.from_repeats((2, 2)), arguments(tmp_path / "b", preset=preset), digits, None, name="b",
        student={"init": "last", "mlp_type": "gelu", "intermediate_size": None},
    )  # fmt: skip
    assert model.config.mlp_type == "gelu"
    assert record["training"]["student"]["init"] == "last"
