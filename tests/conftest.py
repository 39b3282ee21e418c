"""Fixtures for all tests: tiny configurations, models and teachers, made in memory, offline, the same in every run."""

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1")  # before any import
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoConfig, AutoModel

from raptor_hf import DistillationArguments, RaptorConfig, RaptorDistillationTrainer, RaptorModel
from raptor_hf.data import PixelDataset, dinov2_processor, load_images
from raptor_hf.teachers import Teacher
from raptor_hf.vision_models import without_pooler

torch.set_num_threads(1)  # tiny tensors are slower on several, and sums then do not depend on the machine

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "patch_size": 14, "image_size": 56, "num_hidden_layers": 3}


def jitter(model, std=0.1, seed=0):
    """Moves every weight away from 0 and 1, so that no test passes because something happens to vanish."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((std * noise).to(parameter.dtype))
    return model.eval()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def make_config():
    """Factory: a tiny `RaptorConfig` with the schedule [0, 0, 1]; keyword arguments replace its fields."""

    def factory(**overrides):
        fields = {**SIZES, "num_register_tokens": 4, "block_schedule": [0, 0, 1], **overrides}
        if "num_hidden_layers" not in overrides:
            fields["num_hidden_layers"] = len(fields["block_schedule"])
        return RaptorConfig(**fields)

    return factory


@pytest.fixture
def make_model(make_config):
    """Factory: a tiny model (`model_class`, default `RaptorModel`) in evaluation mode whose weights are all random.

    Keyword arguments are fields of its configuration; `jittered=False` keeps the documented start values.
    """

    def factory(model_class=RaptorModel, *, jittered=True, **overrides):
        model = model_class(make_config(**overrides))
        return jitter(model) if jittered else model.eval()

    return factory


@pytest.fixture
def tiny_config(make_config):
    """Hidden size 32, 2 heads, patch 14, image 56, 4 registers, schedule [0, 0, 1]."""
    return make_config()


@pytest.fixture
def tiny_model(make_model):
    """`RaptorModel` of `tiny_config` with random weights."""
    return make_model()


@pytest.fixture
def make_teacher():
    """Factory: `make_teacher(family, **overrides)`, a tiny `Teacher` of 3 layers with random weights.

    `family` is a key of `raptor_hf.teachers.FAMILIES`; overrides are fields of that family's configuration, and
    `image_processor`.
    """

    def factory(family="dinov2_with_registers", *, image_processor=None, seed=0, **overrides):
        fields = dict(SIZES)
        if not family.startswith("dinov2"):
            fields["intermediate_size"] = 4 * SIZES["hidden_size"]
        config = AutoConfig.for_model(family, **{**fields, **overrides})
        model = AutoModel.from_config(config, **without_pooler(config))
        return Teacher(jitter(model, seed=seed), image_processor)

    return factory


@pytest.fixture
def pixels():
    """Two images of the native size, `(2, 3, 56, 56)`."""
    return torch.randn(2, 3, 56, 56, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def images():
    """Sixteen processed images of 28 pixels, of two classes."""
    generator = torch.Generator().manual_seed(3)
    return [{"pixel_values": torch.randn(3, 28, 28, generator=generator), "label": i % 2} for i in range(16)]


@pytest.fixture
def teacher(make_teacher):
    """A `Teacher` of 4 layers for images of 28 pixels, with its image processor."""
    return make_teacher(num_hidden_layers=4, image_size=28, image_processor=dinov2_processor(28))


@pytest.fixture
def make_trainer(teacher, images, tmp_path):
    """Factory: a trainer of `teacher` for 4 steps in `tmp_path / folder`; keyword arguments are its arguments."""

    def factory(
        folder="run",
        repeats=(2, 2),
        train=images,
        evaluation=images[:6],
        callbacks=None,
        blocks=None,
        init="middle",
        **options,
    ):
        options = {
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_steps": 1,
            "save_total_limit": None,
            "loss_scale_images": 8,
            "blocks_share": 0.5,
            "max_grad_norm": 0.0,
            "bf16": False,
            **options,
        }
        args = DistillationArguments(
            output_dir=str(tmp_path / folder), use_cpu=True, report_to="none", disable_tqdm=True, **options
        )
        torch.manual_seed(5)
        student = RaptorModel.from_teacher(teacher, repeats, init=init)
        return RaptorDistillationTrainer(student, teacher, args, train, evaluation, blocks=blocks, callbacks=callbacks)

    return factory


@pytest.fixture
def digits(teacher):
    """Eight digits through the processor of `teacher`."""
    return PixelDataset(load_images("digits", split="train", max_images=8), teacher.image_processor)
