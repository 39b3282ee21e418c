"""Model cards: what the results hold and no more, metadata that the Hub takes, and edits that survive."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from raptor_hf import RaptorForImageClassification
from raptor_hf.card_edits import check_card
from raptor_hf.cards import add_probe, find_results, model_card, own_results, write_card
from raptor_hf.results import read_json, write_json
from sample_results import NAN, make_results

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(make_model, tmp_path):
    """A saved Raptor, as `raptor-k2` of a run whose results lie above it."""
    make_model(block_schedule=[0, 0, 1, 1]).save_pretrained(tmp_path / "run" / "raptor-k2" / "model")
    write_json(tmp_path / "run" / "results.json", make_results())
    return tmp_path / "run" / "raptor-k2" / "model"


def metadata(card):
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)[1])


def test_numbers_are_those_of_the_results(folder):
    card = model_card(folder, find_results(folder), license="apache-2.0")
    data = metadata(card)
    assert data["library_name"] == "transformers"
    assert {"raptor", "raptor_hf", "custom_code"} <= set(data["tags"])
    assert data["pipeline_tag"] == "image-feature-extraction"
    assert data["license"] == "apache-2.0"
    (result,) = data["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 0.89
    assert result["dataset"]["name"] == "digits"
    assert "| all | 0.900 | 1.000 | 0.800 | 0.900 |" in card
    assert "| cls | 0.800 | 0.900 | 0.700 | – |" in card
    assert "| patch | – | – | – | – |" in card
    assert "| raptor-k2 | 89.00 ± 1.37 | 97.8 % |" in card
    assert "with 50.0 % of its parameters" in card
    assert "1-2 \\| 3-4" in card
    assert "| batch_size" not in card  # the results have none
    assert 'RaptorModel.from_pretrained("org/raptor-k2")' in card


def test_what_was_not_run_says_so(folder):
    card = model_card(folder)
    assert card.count("Not yet run.") == 3
    assert "model-index" not in metadata(card)
    assert "base_model" not in metadata(card)
    assert "No accuracy on a task has been measured." in card


def test_a_head_is_a_classifier(make_model, tmp_path):
    make_model(RaptorForImageClassification, num_labels=2).save_pretrained(tmp_path / "head")
    card = model_card(tmp_path / "head", repo_id="alice/head")
    assert metadata(card)["pipeline_tag"] == "image-classification"
    assert 'AutoModelForImageClassification.from_pretrained("alice/head", trust_remote_code=True)' in card


@pytest.mark.parametrize("teacher", ["./dino", "../dino", "/home/somebody/dino", "runs/teacher", "dino"])
def test_paths_are_no_metadata(teacher, folder, tmp_path, monkeypatch):
    """A local path of a teacher or of images is in no metadata, nor with its folders in the text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "teacher").mkdir(parents=True)
    results = make_results()
    results["teacher"]["name"] = teacher
    results["dataset"]["name"] = "../ade"
    card = model_card(folder, own_results(results, results["models"][0]))
    assert "base_model" not in metadata(card)
    assert "datasets" not in metadata(card)
    assert "somebody" not in card
    check_card(card)


def test_hub_ids_are_metadata(folder):
    results = make_results()
    results["teacher"]["name"] = "facebook/dinov2-with-registers-base"
    results["dataset"]["name"] = "ILSVRC/imagenet-1k"
    data = metadata(model_card(folder, own_results(results, results["models"][0])))
    assert data["base_model"] == "facebook/dinov2-with-registers-base"
    assert data["datasets"] == ["ILSVRC/imagenet-1k"]


def test_own_results_are_strict_json_without_the_others(folder):
    results = make_results()
    results["models"][0]["training"]["per_class"] = {"iou": np.array([0.5, NAN])}
    own = own_results(results, results["models"][0])
    text = json.dumps(own, allow_nan=False)
    assert own["models"][0]["path"] == "."
    assert own["models"][0]["training"]["per_class"] == {"iou": [0.5, None]}
    assert "history" not in own["models"][0]["training"]
    assert set(own["probe"]["results"]) == {"teacher", "raptor-k2"}
    assert "ViT-S" not in text
    assert "somebody" not in text


def run_results(folder, **probe):
    """Results of the run, with another probe of the model in `folder`."""
    results = make_results()
    results["probe"]["results"]["raptor-k2"].update(probe)
    return own_results(results, results["models"][0])


def test_results_are_found_beside_the_model_and_else_above_it(folder, tmp_path):
    assert find_results(folder)["models"][0]["name"] == "raptor-k2"
    write_card(folder)
    write_json(folder.parents[1] / "results.json", {**make_results(), "probe": {}})
    assert find_results(folder)["probe"]["results"]["raptor-k2"]["mean"] == 0.89  # what its card was written from
    moved = tmp_path / "elsewhere"
    shutil.move(folder, moved)
    assert find_results(moved) == read_json(moved / "results.json")
    assert model_card(moved, find_results(moved)) == (moved / "README.md").read_text(encoding="utf-8")
    (moved / "results.json").unlink()
    assert find_results(moved) is None


def test_probe_results_of_another_run(folder):
    results = make_results()
    results.pop("probe")
    own = own_results(results, results["models"][0])
    scores = {"teacher": {"mean": 0.8}, "raptor-k2/model": {"mean": 0.7, "std": 0.01, "retained": 0.875}}
    probe = {"dataset": "photos", "protocol": {"epochs": 1}, "results": scores}
    add_probe(own, {"probe": probe}, ["raptor-k2", "raptor-k2/model"])
    card = model_card(folder, own)
    assert "| raptor-k2 | 70.00 ± 1.00 | 87.5 % |" in card
    assert metadata(card)["model-index"][0]["results"][0]["dataset"]["name"] == "photos"  # not what it was distilled on
    with pytest.raises(ValueError, match=r"the probe results are of a, not of raptor-k2"):
        add_probe(own, {"probe": {"results": {"a": {"mean": 1.0}}}}, ["raptor-k2"])


def test_writing_twice_changes_nothing_and_new_results_show(folder):
    path = write_card(folder, license="mit")
    first = path.read_bytes()
    assert {"README.md", "results.json", "schedule.png"} <= {file.name for file in folder.iterdir()}
    assert write_card(folder).read_bytes() == first  # the licence of the card is kept
    card = write_card(folder, run_results(folder, mean=0.9)).read_text(encoding="utf-8")
    assert "90.00 ± 1.37" in card
    assert metadata(card)["license"] == "mit"


def test_edits_around_the_generated_part_survive(folder):
    path = write_card(folder)
    edited = path.read_text(encoding="utf-8").replace("- custom_code", "- custom_code\n- mine")
    path.write_text(f"{edited}\n## Ours\n\nA note.\n", encoding="utf-8")
    for _ in range(2):
        card = write_card(folder, run_results(folder, mean=0.95)).read_text(encoding="utf-8")
        assert "A note." in card
        assert "mine" in metadata(card)["tags"]
        assert "95.00 ± 1.37" in card
        assert metadata(card)["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.95
    results = own_results({**make_results(), "probe": {}}, make_results()["models"][0])
    card = write_card(folder, results, license="mit").read_text(encoding="utf-8")
    assert "model-index" not in metadata(card)  # nor does it keep numbers that the text has no longer
    assert metadata(card)["license"] == "mit"
    path.write_text(card.rstrip(), encoding="utf-8")  # as some editors do
    assert "95.00" in write_card(folder, run_results(folder, mean=0.95)).read_text(encoding="utf-8")
    assert "A note." not in write_card(folder, overwrite=True).read_text(encoding="utf-8")


@pytest.mark.parametrize("edit", [lambda card: card.replace("Held-out", "My held-out"), lambda card: "# Mine\n"])
def test_edits_in_the_generated_part_make_the_card_theirs(edit, folder):
    path = write_card(folder)
    path.write_text(edit(path.read_text(encoding="utf-8")), encoding="utf-8")
    before = path.read_text(encoding="utf-8")
    assert write_card(folder, run_results(folder, mean=0.5)).read_text(encoding="utf-8") == before
    if before.startswith("---"):
        card = write_card(folder, license="mit").read_text(encoding="utf-8")
        assert metadata(card)["license"] == "mit"
        assert "My held-out" in card


def test_a_folder_without_a_raptor_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder of a saved Raptor"):
        model_card(tmp_path)
    for content in ('{"model_type": "vit"}', "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="is no folder of a saved Raptor"):
            model_card(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no strict JSON \(.+\); write or save it again"):
        model_card(tmp_path)


def test_metadata_that_are_no_yaml_are_refused(folder):
    path = write_card(folder)
    text = path.read_text(encoding="utf-8").replace("library_name", "note: a: b\nlibrary_name")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="the model card's metadata are no YAML"):
        write_card(folder)
    assert path.read_text(encoding="utf-8") == text


def test_the_hubs_own_class_reads_the_card(folder):
    card = ModelCard(model_card(folder, find_results(folder)))
    assert card.data.eval_results[0].metric_value == 0.89
    assert card.data.model_name == "raptor-k2"


@pytest.mark.parametrize("name", sorted(path.parent.name for path in (ROOT / "model_cards").glob("*/README.md")))
def test_cards_in_the_repository_are_what_the_template_renders(name):
    folder = ROOT / "model_cards" / name
    planned = (ROOT / "examples" / "recipes" / f"{name}.yaml").is_file()
    results = read_json(folder / "results.json" if planned else ROOT / "examples" / "quickstart" / "results.json")
    model = next(model for model in results["models"] if planned or model["name"] == name)
    assert (folder / "README.md").read_text(encoding="utf-8") == model_card(folder, own_results(results, model))


def test_the_repository_has_cards():
    recipes = {path.stem for path in (ROOT / "examples" / "recipes").glob("*.yaml")}
    assert len(recipes) == 5
    found = {path.name for path in (ROOT / "model_cards").iterdir()}
    assert found == {"template.md", "raptor-k2", "raptor-k3", *recipes}
