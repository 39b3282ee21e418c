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
from transformers import BitImageProcessorPil

from hub_server import Hub
from raptor_hf import RaptorForImageClassification

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
        assert set(auto_map) == {"AutoConfig", "AutoModel", "AutoBackbone", "AutoModelForImageClassification"}
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
