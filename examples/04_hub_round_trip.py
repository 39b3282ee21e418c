r"""The whole way of a Raptor over the Hub: pushed, loaded elsewhere, fine-tuned, pushed to a branch.

    raptor-hf quickstart
    python examples/04_hub_round_trip.py runs/quickstart/k3/seed0/model my-name/raptor-digits

A private repository is made with the token of `HF_TOKEN` or `hf auth login`. Against a Hub of its own, without network:

    python tests/hub_server.py -- \
        python examples/04_hub_round_trip.py runs/quickstart/k3/seed0/model alice/raptor-digits
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, TrainingArguments

from raptor_hf import RaptorModel
from raptor_hf.data import PixelDataset, collate_pixels, load_images
from raptor_hf.hub import push_folder

# Runs where the package cannot be imported: the repository's own code makes the model.
ELSEWHERE = """
import sys
sys.modules["raptor_hf"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, pipeline
repo_id, images, outputs = sys.argv[1:]
model = AutoModel.from_pretrained(repo_id, trust_remote_code=True)
with torch.no_grad():
    save_file({"states": model(load_file(images)["pixels"]).last_hidden_state}, outputs)
from PIL import Image
features = pipeline("image-feature-extraction", repo_id, trust_remote_code=True)(Image.new("RGB", (32, 32)))
print(f"a process without raptor_hf: {type(model).__module__.split('.')[0]}, {len(features[0])} tokens per image")
"""


def main(argv: list[str] | None = None) -> int:
    """Runs the tour; returns 0, or raises where something is not as it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of a saved Raptor that digits mean something to")
    parser.add_argument("repo_id", help="repository that is made, as my-name/raptor-digits")
    parser.add_argument("--max-steps", type=int, default=60, help="steps of the fine-tuning")
    args = parser.parse_args(argv)
    api = HfApi()

    commit = push_folder(args.folder, args.repo_id, private=True)
    print(f"pushed: {commit.oid[:8]} of {args.repo_id}, private {api.model_info(args.repo_id).private}")

    model = RaptorModel.from_pretrained(args.repo_id).eval()
    pixels = example_pixels(args.folder)
    with torch.no_grad():
        expected = RaptorModel.from_pretrained(args.folder).eval()(pixels).last_hidden_state
        if not torch.equal(model(pixels).last_hidden_state, expected):
            raise RuntimeError("the Raptor from the Hub gives other states than the one that was pushed")
    with tempfile.TemporaryDirectory() as scratch:
        images, outputs = Path(scratch) / "images.safetensors", Path(scratch) / "outputs.safetensors"
        save_file({"pixels": pixels}, images)
        subprocess.run([sys.executable, "-c", ELSEWHERE, args.repo_id, str(images), str(outputs)], check=True)
        if not torch.equal(load_file(outputs)["states"], expected):
            raise RuntimeError("a process without raptor_hf gives other states")
        print("the same states bit for bit, with raptor_hf and without it")

        training = TrainingArguments(
            output_dir=f"{scratch}/tuned", max_steps=args.max_steps, per_device_train_batch_size=32, learning_rate=2e-3,
            report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        tuning = load_example("03_fine_tune.py")
        options = tuning.FineTuneArguments(model=args.repo_id, dataset="digits", method="lora")
        _, metrics = tuning.fine_tune(options, training)
        print(f"fine-tuned with LoRA for {args.max_steps} steps: top-1 {metrics['eval_accuracy']:.3f}")
        push_folder(f"{scratch}/tuned/model", args.repo_id, revision="tuned", commit_message="LoRA on digits, merged")
    for revision in ("main", "tuned"):
        titles = [commit.title for commit in api.list_repo_commits(args.repo_id, revision=revision)]
        print(f"history of {revision}: {' <- '.join(titles)}")
    return 0


def example_pixels(folder: str) -> torch.Tensor:
    """Eight digits as the Raptor sees them, `(8, 3, height, width)`."""
    pixels = PixelDataset(load_images("digits", split="test", max_images=8), AutoImageProcessor.from_pretrained(folder))
    return collate_pixels([pixels[index] for index in range(len(pixels))])["pixel_values"]


def load_example(name: str) -> ModuleType:
    """Another script of this folder as a module; its name begins with a number."""
    spec = importlib.util.spec_from_file_location(name[3:-3], Path(__file__).with_name(name))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
