"""The quickstart in small: every part runs, a broken one is noticed, and an interrupted one goes on."""

import json
import pathlib

import pytest
import torch

from raptor_hf import RaptorModel
from raptor_hf.data import load_images
from raptor_hf.quickstart import QuickstartArguments, check_reload, run_quickstart
from raptor_hf.vit_training import KeptPixels, digits_processor


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A finished run on few digits; sizes too small to learn anything."""
    args = QuickstartArguments(
        output_dir=str(tmp_path_factory.mktemp("quickstart")), num_blocks=[2, 3], teacher_epochs=1, distill_steps=4,
        batch_size=16, probe_epochs=2, max_images=48,
    )  # fmt: skip
    return args, run_quickstart(args)


def test_results_hold_teacher_phases_raptors_and_probe(small):
    args, results = small
    assert results["teacher"]["num_layers"] == 12
    assert set(results["phases"]["partitions"]) == {"2", "3"}
    assert [model["name"] for model in results["models"]] == ["raptor-k2", "raptor-k3"]
    assert set(results["probe"]["results"]) == {"teacher", "raptor-k2", "raptor-k3"}
    assert results["dataset"] == {"name": "digits", "num_train": 48, "num_test": 48, "num_skipped": 0}
    assert results["models"][0]["fidelity"]["num_images"] == 48
    assert results["models"][0]["training"]["steps"] == 4
    assert results == json.loads((pathlib.Path(args.output_dir) / "results.json").read_text())


def test_models_reload_from_the_folder_that_results_name(small, tmp_path):
    args, results = small
    for entry in results["models"]:
        model = RaptorModel.from_pretrained(f"{args.output_dir}/{entry['path']}")
        assert model.config.num_blocks == entry["num_blocks"]
        assert model.num_parameters() == entry["num_parameters"]
        assert model.config.teacher_name_or_path is not None


def test_an_interrupted_run_goes_on_with_what_is_there(small):
    args, results = small
    again = run_quickstart(args)
    for key in ("phases", "models", "dataset", "teacher", "probe"):
        assert again[key] == results[key]


def test_a_raptor_that_does_not_reload_is_noticed(small):
    args, results = small
    folder = f"{args.output_dir}/{results['models'][0]['path']}"
    model = RaptorModel.from_pretrained(folder).eval()
    pixels = KeptPixels(load_images("digits", split="test", max_images=4), digits_processor())
    check_reload(folder, model, pixels)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[0, 0] += 1e-3
    with pytest.raises(RuntimeError, match="a fresh process could not reproduce it: its outputs differ"):
        check_reload(folder, model, pixels)
    with pytest.raises(RuntimeError, match=r"(?s)could not reproduce it: .*no-such-folder"):
        check_reload(f"{folder}/no-such-folder", model, pixels)


def test_wrong_sizes_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"num_seeds=0, num_blocks=\[2, 3\]: give at least one of each"):
        run_quickstart(QuickstartArguments(output_dir=str(tmp_path), num_seeds=0))
