"""Saved folders and the Hub, as a stranger meets them: a fresh process that does not have this package, and the real
client against a Hub of our own (`hub_server.py`).
"""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BitImageProcessorPil, DPTImageProcessorPil

from hub_server import Hub
from raptor_hf import (
    RaptorForDepthEstimation,
    RaptorForImageClassification,
    RaptorForSemanticSegmentation,
    RaptorModel,
)
from raptor_hf.hub import CODE_FILES
from raptor_hf.modeling_raptor import AUTO_MAP

# A process in which neither the package nor what the Hub files must not need can be imported.
STRANGER = """
import sys
for name in ("raptor_hf", "datasets", "evaluate", "matplotlib", "sklearn"):
    sys.modules[name] = None
import json, torch
from safetensors.torch import load_file, save_file
from transformers import AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, pipeline
from transformers import AutoModelForImageClassification
FOLDER, OTHER, SCRATCH = sys.argv[1:4]
PIXELS = load_file(SCRATCH + "/pixels.safetensors")["pixels"]
torch.set_num_threads(1)
"""

SIDE = {"height": 56, "width": 56}
PROCESSOR = BitImageProcessorPil(size=SIDE, crop_size=SIDE, do_center_crop=False)


def run_stranger(code, folder, other, scratch, environment):
    process = subprocess.run(
        [sys.executable, "-c", STRANGER + code, str(folder), str(other), str(scratch)],
        capture_output=True, text=True, check=False, cwd=scratch, env=environment,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return process


@pytest.fixture
def offline(tmp_path):
    """Environment of a machine without network and with empty caches."""
    environment = Hub.environment(None, tmp_path / "home", token=None, endpoint="http://127.0.0.1:9")
    return environment | {"HF_HUB_OFFLINE": "1"}


@pytest.fixture
def scratch(tmp_path):
    (tmp_path / "scratch").mkdir()
    pixels = torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(4))
    save_file({"pixels": pixels}, tmp_path / "scratch" / "pixels.safetensors")
    return tmp_path / "scratch"


def expected(model, scratch):
    with torch.no_grad():
        outputs = model(load_file(scratch / "pixels.safetensors")["pixels"])
    return outputs


def test_a_saved_folder_is_self_contained(make_model, offline, scratch, tmp_path):
    """Loaded offline without the package from a folder with a dot in its name, saved again, moved, loaded again."""
    model = make_model(RaptorForImageClassification, num_labels=3, adapter_rank=2)
    first, second, third = tmp_path / "raptor.k2.v1", tmp_path / "second", tmp_path / "elsewhere" / "third"
    model.save_pretrained(first)
    PROCESSOR.save_pretrained(first)
    run_stranger(
        """
base = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
head = AutoModelForImageClassification.from_pretrained(FOLDER, trust_remote_code=True)
processor = AutoImageProcessor.from_pretrained(FOLDER, trust_remote_code=True)
with torch.no_grad():
    save_file({"base": base(PIXELS).last_hidden_state, "head": head(PIXELS).logits}, SCRATCH + "/first.safetensors")
head.save_pretrained(OTHER)
base.save_pretrained(OTHER + "-base")
processor.save_pretrained(OTHER)
""",
        first, second, scratch, offline,
    )  # fmt: skip
    shutil.rmtree(first)
    third.parent.mkdir()
    for folder, ending in ((second, ""), (tmp_path / "second-base", "-base")):
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert auto_map.keys() == {"AutoConfig", *AUTO_MAP}
        assert not any("--" in target for target in auto_map.values())
        folder.rename(f"{third}{ending}")
    run_stranger(
        """
head = AutoModelForImageClassification.from_pretrained(FOLDER, trust_remote_code=True)
other = AutoModelForImageClassification.from_pretrained(OTHER, trust_remote_code=True)
base = AutoModel.from_pretrained(OTHER, trust_remote_code=True)
config = AutoConfig.from_pretrained(FOLDER, trust_remote_code=True)
backbone = AutoBackbone.from_config(config, trust_remote_code=True)
assert (config.num_blocks, backbone(PIXELS).feature_maps[0].shape) == (2, (2, 32, 4, 4))
with torch.no_grad():
    save_file({"base": base(PIXELS).last_hidden_state, "head": head(PIXELS).logits}, SCRATCH + "/third.safetensors")
from PIL import Image
image = Image.new("RGB", (40, 40), (200, 30, 90))
for task, target in (("image-classification", FOLDER), ("image-feature-extraction", OTHER)):
    pipe = pipeline(task, target, image_processor=FOLDER, trust_remote_code=True)
    result = pipe(image)
    assert len(result) == (3 if task == "image-classification" else 1), result
""",
        third, f"{third}-base", scratch, offline | {"HF_MODULES_CACHE": str(tmp_path / "modules")},
    )  # fmt: skip
    with torch.no_grad():
        pixels = load_file(scratch / "pixels.safetensors")["pixels"]
        own = {"base": model.raptor(pixels).last_hidden_state, "head": model(pixels).logits}
    for name in ("first", "third"):
        loaded = load_file(scratch / f"{name}.safetensors")
        assert all(torch.equal(loaded[key], own[key]) for key in own), name


# ---- pushing ----

# A process that has the package, as a user's terminal does.
CLIENT = """
import sys, json
from raptor_hf.cli import main
def raptor_hf(*arguments):
    code = main(list(arguments))
    print("EXIT", code)
"""


def run_client(code, *arguments, environment):
    process = subprocess.run(
        [sys.executable, "-c", CLIENT + code, *map(str, arguments)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    assert "hf_alice" not in process.stdout + process.stderr
    codes = [int(line.split()[1]) for line in process.stdout.splitlines() if line.startswith("EXIT")]
    return codes, process.stderr


@pytest.fixture
def hub():
    with Hub() as server:
        yield server


@pytest.fixture
def saved(make_model, tmp_path):
    """A saved Raptor with its processor, and things beside it that are nobody's business."""
    folder = tmp_path / "run" / "model"
    make_model(teacher_name_or_path="/home/somebody/teachers/dino").save_pretrained(folder)
    PROCESSOR.save_pretrained(folder)
    for name in ("optimizer.pt", "training_args.bin", "notes.txt", "train.py"):
        (folder / name).write_text("private")
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "model.safetensors").write_text("private")
    return folder


def state(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def uploads(hub):
    return [path for method, path in hub.requests if method == "PUT" or "/commit/" in path]


def test_push_by_command_and_load_by_name(hub, saved, scratch, tmp_path):
    """One commit with exactly what is needed; pushed again it is no commit; a stranger loads it by id with a token."""
    before = state(saved)
    environment = hub.environment(tmp_path / "alice")
    code = """
for extra in ([], [], ["--revision", "tuned", "--license", "mit"], ["--create-pr", "--license", "apache-2.0"]):
    raptor_hf("push", sys.argv[1], "alice/raptor.k2", "--private", *extra)
"""
    codes, error = run_client(code, saved, environment=environment)
    assert codes == [0, 0, 0, 0], error
    repo = hub.repos["alice/raptor.k2"]
    assert repo.private
    assert state(saved) == before
    assert set(repo.trees[repo.refs["main"]]) == {
        "README.md", "config.json", "model.safetensors", "preprocessor_config.json", "schedule.png",
        *CODE_FILES,
    }  # fmt: skip
    sent = [hub.blobs[oid] for name, oid in repo.trees[repo.refs["main"]].items() if name.endswith((".json", ".md"))]
    assert not any(b"somebody" in content for content in sent)
    assert any(b'"teacher_name_or_path": "dino"' in content for content in sent)
    assert len(list(repo.history("main"))) == 2  # the first, and one push of two
    assert len(list(repo.history("tuned"))) == 3
    assert len(list(repo.history("refs/pr/1"))) == 3
    assert [path for path in uploads(hub) if path.startswith("/blobs/")] == [
        f"/blobs/{repo.trees[repo.refs['main']]['model.safetensors']}"
    ]
    model = RaptorModel.from_pretrained(saved)
    run_stranger(
        """
model = AutoModel.from_pretrained("alice/raptor.k2", trust_remote_code=True, revision="tuned")
backbone = AutoBackbone.from_pretrained("alice/raptor.k2", trust_remote_code=True, out_indices=[1, 3])
processor = AutoImageProcessor.from_pretrained("alice/raptor.k2")
assert len(backbone(PIXELS).feature_maps) == 2
from PIL import Image
pipeline("image-feature-extraction", "alice/raptor.k2", trust_remote_code=True)(Image.new("RGB", (56, 56)))
with torch.no_grad():
    save_file({"base": model(PIXELS).last_hidden_state}, SCRATCH + "/loaded.safetensors")
""",
        "-", "-", scratch, environment | {"HF_HOME": str(tmp_path / "stranger")},
    )  # fmt: skip
    loaded = load_file(scratch / "loaded.safetensors")["base"]
    assert torch.equal(loaded, expected(model, scratch).last_hidden_state)
    code = """
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub import hf_hub_download
for token, status in ((False, 401), ("hf_bob", 404), ("hf_mallory", 401)):
    try:
        hf_hub_download("alice/raptor.k2", "config.json", token=token)
    except HfHubHTTPError as error:
        assert error.response.status_code == status, error
    else:
        raise SystemExit("a private repository was read")
"""
    run_client(code, environment=hub.environment(tmp_path / "others", token=None))


@pytest.mark.parametrize(
    ("head", "auto", "task"),
    [
        (RaptorForSemanticSegmentation, "AutoModelForSemanticSegmentation", "image-segmentation"),
        (RaptorForDepthEstimation, "AutoModelForDepthEstimation", "depth-estimation"),
    ],
)
def test_dense_heads_by_name(head, auto, task, make_model, hub, scratch, tmp_path):
    """Pushed like any model; a stranger has its outputs and its pipeline, for pictures of any size."""
    options = {"num_labels": 5} if task == "image-segmentation" else {"num_depth_bins": 16}
    model = make_model(head, **options)
    model.save_pretrained(tmp_path / "model")
    DPTImageProcessorPil(size=SIDE).save_pretrained(tmp_path / "model")
    environment = hub.environment(tmp_path / "alice")
    codes, error = run_client(
        'raptor_hf("push", sys.argv[1], "alice/head")', tmp_path / "model", environment=environment
    )
    assert codes == [0], error
    repo = hub.repos["alice/head"]
    card = hub.blobs[repo.trees[repo.refs["main"]]["README.md"]].decode()
    assert f"pipeline_tag: {task}" in card
    run_stranger(
        f"""
from transformers import {auto}
model = {auto}.from_pretrained("alice/head", trust_remote_code=True)
with torch.no_grad():
    save_file({{"found": model(PIXELS)[0].contiguous()}}, SCRATCH + "/found.safetensors")
from PIL import Image
result = pipeline("{task}", "alice/head", trust_remote_code=True)(Image.new("RGB", (41, 60), (200, 30, 90)))
size = result["depth"].size if "{task}" == "depth-estimation" else result[0]["mask"].size
assert size == (41, 60), size
""",
        "-", "-", scratch, environment | {"HF_HOME": str(tmp_path / "stranger")},
    )  # fmt: skip
    assert torch.equal(load_file(scratch / "found.safetensors")["found"], expected(model, scratch)[0])


def test_nothing_is_sent_before_all_is_checked(hub, saved, tmp_path):
    """Bad licences, tokens, names, folders: exit code 2, one line, nothing created, nothing uploaded."""
    names = ("no-code", "no-processor", "torn", "no-weights", "no-raptor", "two-saves", "some-weights", "bad-processor")
    broken = {name: tmp_path / name for name in names}
    for folder in broken.values():
        shutil.copytree(saved, folder)
    (broken["no-code"] / "modeling_raptor.py").unlink()
    (broken["no-processor"] / "preprocessor_config.json").unlink()
    torn = (saved / "model.safetensors").read_bytes()
    (broken["torn"] / "model.safetensors").write_bytes(torn[: len(torn) // 2])
    (broken["no-weights"] / "model.safetensors").unlink()
    (broken["no-raptor"] / "config.json").write_text("{}")
    (broken["two-saves"] / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    weights = load_file(saved / "model.safetensors")
    some = {name: value for name, value in weights.items() if name.startswith("blocks.")}
    save_file(some, broken["some-weights"] / "model.safetensors")
    (broken["bad-processor"] / "preprocessor_config.json").write_text("{")
    code = """
saved, *broken = sys.argv[1:]
raptor_hf("push", saved, "alice/a", "--license", "No Such Licence")
raptor_hf("push", saved, "alice/a", "--license", "unheard-of-1.0")
raptor_hf("push", saved, "alice/a/b")
raptor_hf("push", saved, "bob/a")
raptor_hf("push", saved)
raptor_hf("push", saved, "alice/a", "--create-pr", "--revision", "dev")
for folder in broken:
    raptor_hf("push", folder, "alice/a")
"""
    codes, error = run_client(code, saved, *broken.values(), environment=hub.environment(tmp_path / "home"))
    assert codes == [2] * 14
    for message in (
        "license='No Such Licence' in the model card is no identifier",
        "the Hub refuses the model card",
        "Repo id must be",
        "bob/a: the Hub answers 403; the token may not write there",
        "give a folder and a repository",
        "lacks the code that loads it without raptor_hf",
        "has no preprocessor_config.json; add it with image_processor.save_pretrained",
        "is damaged",
        "lacks the weights model.safetensors",
        "is no folder of a saved Raptor",
        "of two saves; delete the older one",
        "lacks 7 weights, embeddings.cls_token among them",
        "preprocessor_config.json is no strict JSON",
        "revision='dev' and create_pr exclude each other",
    ):
        assert message in error
    assert "Traceback" not in error
    assert hub.repos == {}
    assert uploads(hub) == []


def test_an_interrupted_push_is_run_again(hub, saved, tmp_path):
    """The Hub fails after a few requests, each time a little later, until the push goes through; then, once public, it
    is not taken for private; and without a token nothing is asked at all.
    """
    before = state(saved)
    code = """
import os, urllib.request
for allowed in ("1", "4", "6", "-"):
    urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/fail-after/" + allowed)
    raptor_hf("push", sys.argv[1], "alice/a")
raptor_hf("push", sys.argv[1], "alice/a", "--private", "--license", "mit")
del os.environ["HF_TOKEN"]
raptor_hf("push", sys.argv[1], "alice/a")
from raptor_hf.hub import push_folder
try:
    push_folder(sys.argv[1], "alice/a", token="hf_mallory", license="mit")
except ValueError as error:
    assert "alice/a: the Hub answers 401; the token is missing, wrong or expired" in str(error), error
else:
    raise SystemExit("a wrong token was accepted")
push_folder(sys.argv[1], "alice/a", token="hf_" + "alice")
"""
    codes, error = run_client(code, saved, environment=hub.environment(tmp_path / "home"))
    assert codes == [1, 1, 1, 0, 2, 2]
    assert error.count("the upload did not finish") == 3
    assert error.count("is unchanged, run the same command again") == 3
    assert "alice/a is public already" in error
    assert "no token for the Hub; run `hf auth login` or set HF_TOKEN" in error
    assert state(saved) == before
    assert len(list(hub.repos["alice/a"].history("main"))) == 2


def test_a_training_is_pushed_at_its_end_and_a_hub_that_is_away_costs_nothing(hub, teacher, tmp_path):
    """The Hub answers nothing while the first run ends: the Raptor is saved, exit code 1 says how to send it."""
    teacher.model.save_pretrained(tmp_path / "teacher")
    teacher.image_processor.save_pretrained(tmp_path / "teacher")
    code = """
import os, urllib.request
run = ["distill", sys.argv[1], "--repeats", "2", "2", "--max-steps", "2", "--max-images", "16", "--use-cpu",
       "--per-device-train-batch-size", "4", "--report-to", "none", "--push-to-hub", "--hub-private-repo",
       "--hub-model-id", "alice/small", "--output-dir"]
urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/fail-after/0")
raptor_hf(*run, sys.argv[1] + "-away")
urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/fail-after/-")
raptor_hf("push", sys.argv[1] + "-away/model", "alice/away")
raptor_hf(*run, sys.argv[1] + "-run")
del os.environ["HF_TOKEN"]
raptor_hf(*run, sys.argv[1] + "-none")
"""
    codes, error = run_client(code, tmp_path / "teacher", environment=hub.environment(tmp_path / "home"))
    assert codes == [1, 0, 0, 2], error
    assert "the upload did not finish" in error
    assert "after a training: raptor-hf push" in error
    assert "--push_to_hub needs a token" in error
    assert not (tmp_path / "teacher-none").exists()
    assert sorted(hub.repos) == ["alice/away", "alice/small"]
    repo = hub.repos["alice/small"]
    files = repo.trees[repo.refs["main"]]
    assert repo.private
    assert {"model.safetensors", "README.md", "preprocessor_config.json", "results.json"} <= set(files)
    assert not any("checkpoint" in name or name.endswith((".pt", ".bin")) for name in files)
    assert not any(b"hf_alice" in hub.blobs[oid] for oid in files.values())


def test_a_card_edited_on_the_hub_is_kept(hub, saved, tmp_path):
    """Pushed, edited here and pushed twice; edited on the Hub, pushed with other weights: the edit is there, weights
    are new, what was exported before is gone; then overwritten.
    """
    code = """
import torch
from huggingface_hub import HfApi
from raptor_hf import RaptorModel
import os, pathlib
own = pathlib.Path(sys.argv[1], "README.md")
pathlib.Path(sys.argv[1], "model.onnx").write_bytes(b"a graph")
raptor_hf("push", sys.argv[1], "alice/a")
raptor_hf("card", sys.argv[1])
for note in ("One.", "Two."):
    own.write_text(own.read_text() + note)
    raptor_hf("push", sys.argv[1], "alice/a")
os.remove(sys.argv[1] + "/model.onnx")
api = HfApi()
card = open(api.hf_hub_download("alice/a", "README.md")).read() + "\\nAdded on the Hub.\\n"
api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id="alice/a")
model = RaptorModel.from_pretrained(sys.argv[1])
with torch.no_grad():
    model.layernorm.bias.add_(1)
model.save_pretrained(sys.argv[1], max_shard_size="20KB")
os.remove(sys.argv[1] + "/model.safetensors")
raptor_hf("push", sys.argv[1], "alice/a", "--commit-message", "Better")
raptor_hf("push", sys.argv[1], "alice/a", "--overwrite-card")
"""
    codes, error = run_client(code, saved, environment=hub.environment(tmp_path / "home"))
    assert codes == [0] * 6, error
    assert "The model card was edited on the Hub and is kept there" in error
    repo = hub.repos["alice/a"]
    overwritten, better, edited, two, one, first, _ = repo.history("main")
    notes = [hub.blobs[repo.trees[commit]["README.md"]].decode() for commit in (first, one, two, edited, better)]
    assert ["One." in card for card in notes] == [False, True, True, True, True]
    assert ["Two." in card for card in notes] == [False, False, True, True, True]
    assert ["model.onnx" in repo.trees[commit] for commit in (first, edited, better)] == [True, True, False]
    assert repo.messages[better][0] == "Better"
    cards = [hub.blobs[repo.trees[commit]["README.md"]].decode() for commit in (first, edited, better, overwritten)]
    assert ["Added on the Hub." in card for card in cards] == [False, True, True, False]
    assert "One." not in cards[-1]
    assert "model.safetensors" in repo.trees[edited]
    assert "model.safetensors" not in repo.trees[better]
    assert "model.safetensors.index.json" in repo.trees[better]


def test_the_librarys_own_push_of_a_loaded_model(hub, saved, tmp_path):
    """`model.push_to_hub` and `push_model` from memory."""
    code = """
from transformers import AutoImageProcessor
from raptor_hf import RaptorModel
from raptor_hf.hub import push_model
model, processor = RaptorModel.from_pretrained(sys.argv[1]), AutoImageProcessor.from_pretrained(sys.argv[1])
model.push_to_hub("alice/plain", private=True)
processor.push_to_hub("alice/plain")
push_model(model, processor, "whole", private=True, license="apache-2.0")
"""
    run_client(code, saved, environment=hub.environment(tmp_path / "home"))
    trees = {name: repo.trees[repo.refs["main"]] for name, repo in hub.repos.items()}
    assert set(trees) == {"alice/plain", "alice/whole"}
    assert set(trees["alice/whole"]) - set(trees["alice/plain"]) == {"schedule.png"}
    plain, whole = (hub.blobs[trees[name]["README.md"]].decode() for name in ("alice/plain", "alice/whole"))
    assert 'from_pretrained("alice/whole")' in whole
    for card in (plain, whole):
        assert "- raptor_hf" in card
        assert "library_name: transformers" in card


def test_push_from_the_trainer(hub, tmp_path):
    """Distilled in a run folder: the student, its processor and a card with its numbers go up, nothing of the run."""
    code = """
import torch
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel
from raptor_hf import DistillationArguments, RaptorDistillationTrainer, RaptorModel, Teacher
from raptor_hf.data import load_images
from raptor_hf.vit_training import digits_processor
config = Dinov2WithRegistersConfig(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=4, mlp_ratio=2)
teacher = Teacher(Dinov2WithRegistersModel(config).eval(), digits_processor())
train, test = (load_images("digits", split=split, max_images=32) for split in ("train", "test"))
args = DistillationArguments(
    output_dir=sys.argv[1], max_steps=4, per_device_train_batch_size=8, use_cpu=True, report_to="none",
    push_to_hub=True, hub_model_id="alice/raptor-k2", hub_private_repo=True, hub_revision="tuned")
trainer = RaptorDistillationTrainer(RaptorModel.from_teacher(teacher, (2, 1)), teacher, args, train, test)
trainer.train()
trainer.evaluate()
trainer.push_to_hub(license="apache-2.0", blocking=True, tags=["a"], dataset="digits")
trainer.create_model_card(model_name="here")
"""
    run_client(code, tmp_path / "blocks" / "run", environment=hub.environment(tmp_path / "home"))
    repo = hub.repos["alice/raptor-k2"]
    assert repo.trees[repo.refs["main"]] == {}
    tree = repo.trees[repo.refs["tuned"]]
    assert repo.private
    assert "results.json" in tree
    assert not any("/" in name or name.endswith((".pt", ".bin", ".pth")) for name in tree)
    card = hub.blobs[tree["README.md"]].decode()
    results = json.loads(hub.blobs[tree["results.json"]])
    r2 = results["models"][0]["fidelity"]["r2"]["all"]
    assert f"| all | {sum(r2) / 3:.3f} | {r2[0]:.3f} | {r2[-1]:.3f} |" in card
    assert "| steps | 4 |" in card
    assert "digits, 32 to train, 32 to measure" in card
    assert str(tmp_path) not in json.dumps(results) + card
    assert (tmp_path / "blocks" / "run" / "model" / "README.md").read_text().count("# here\n") == 1
