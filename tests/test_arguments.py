"""Presets: the two columns of the paper's table as literals, and that a user's value always wins."""

import functools

import pytest
import torch

from raptor_hf.arguments import MODEL_PRESETS, DistillationArguments


def make(**options):
    return DistillationArguments(output_dir="unused", use_cpu=True, **options)


@pytest.mark.parametrize(
    ("preset", "values"),
    [
        (
            "paper",
            {
                "learning_rate": 1e-4,
                "weight_decay": 1e-4,
                "warmup_steps": 0.025,
                "max_grad_norm": 0.0,
                "error": "squared",
                "layer_reduction": "sum",
                "loss_scale": "none",
                "teacher_forcing_start": 0.5,
            },
        ),
        (
            "research",
            {
                "learning_rate": 3e-4,
                "weight_decay": 1e-4,
                "warmup_steps": 0.032,
                "max_grad_norm": 1.0,
                "error": "mse",
                "layer_reduction": "mean",
                "loss_scale": "none",
                "teacher_forcing_start": 1.0,
            },
        ),
        (
            "recommended",
            {
                "learning_rate": 1e-3,
                "weight_decay": 1e-4,
                "warmup_steps": 0.05,
                "max_grad_norm": 1.0,
                "error": "mse",
                "layer_reduction": "mean",
                "loss_scale": "shared_variance",
                "teacher_forcing_start": 0.5,
            },
        ),
    ],
)
def test_presets_are_the_tables_columns(preset, values):
    args = make(preset=preset)
    assert {name: getattr(args, name) for name in values} == values
    ours = preset == "recommended"
    assert args.num_train_epochs == 40
    assert args.blocks_share == (0.25 if ours else 0.5)
    assert args.block_optimizer == ("muon" if ours else "adamw")
    assert args.direction_weight == 0.0
    assert args.per_device_train_batch_size == 64
    assert args.lr_scheduler_type == "cosine_with_min_lr"
    assert args.lr_scheduler_kwargs == {"min_lr": 1e-6}
    assert args.optim in ("adamw_torch", "adamw_torch_fused")
    assert args.teacher_forcing_share == 0.25
    assert args.input_noise_std == 0.0
    assert args.last_block_weights == ([0.2, 0.1, 0.7] if ours else [0.34, 0.33, 0.33])
    assert args.end_to_end_weights == ([0.2, 0.1, 0.7] if ours else [0.45, 0.10, 0.45])
    assert args.objective == "hybrid"


def test_an_optimizer_that_was_asked_for_is_not_replaced():
    assert make(optim="adafactor").block_optimizer == "adamw"
    assert make(optim="adamw_torch").block_optimizer == "muon"
    with pytest.raises(ValueError, match="optim='adafactor' and block_optimizer='muon' exclude each other"):
        make(optim="adafactor", block_optimizer="muon")


def test_model_halves_of_the_presets():
    assert MODEL_PRESETS["paper"] == {"init": "random", "mlp_type": "gelu", "depth_scale_init": "normal"}
    assert MODEL_PRESETS["research"] == {
        "init": "random",
        "mlp_type": "swiglu",
        "intermediate_size": "research",
        "depth_scale_init": "normal",
    }
    assert MODEL_PRESETS["recommended"] == {"init": "middle", "mlp_type": None, "depth_scale_init": "zeros"}


@pytest.mark.parametrize("preset", ["paper", "research", "recommended"])
def test_what_is_set_wins(preset):
    args = make(preset=preset, learning_rate=5e-4, error="frobenius", max_grad_norm=0.5, weight_decay=0.0)
    assert (args.learning_rate, args.error, args.max_grad_norm, args.weight_decay) == (5e-4, "frobenius", 0.5, 0.0)


def test_another_schedule_does_not_get_the_presets_arguments():
    args = make(lr_scheduler_type="linear")
    assert args.lr_scheduler_type == "linear"
    assert args.lr_scheduler_kwargs is None


def test_lambda_falls_linearly_over_a_share_of_stage_one():
    args = make(preset="research")
    weights = [args.teacher_forcing_weight("blocks", step, 100) for step in (0, 5, 10, 24, 25, 99)]
    assert weights == pytest.approx([1.0, 0.8, 0.6, 0.04, 0.0, 0.0])
    assert args.teacher_forcing_weight("end_to_end", 0, 100) == 0.0
    assert make(teacher_forcing_share=0.0).teacher_forcing_weight("blocks", 0, 100) == 0.0


def test_defaults_that_distillation_needs():
    args = make()
    assert args.remove_unused_columns is False
    assert args.dataloader_drop_last is True
    assert args.label_names == []
    assert make(label_names=["labels"]).label_names == ["labels"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "best"}, "preset='best' is unknown; use one of paper, research, recommended"),
        ({"stage": "three"}, "stage='three' is unknown; use one of both, blocks, end_to_end"),
        ({"error": "l1"}, "error='l1' is unknown"),
        ({"layer_reduction": "max"}, "layer_reduction='max' is unknown"),
        ({"block_optimizer": "sgd"}, "block_optimizer='sgd' is unknown; use one of adamw, muon"),
        ({"direction_weight": -1.0}, "direction_weight=-1.0 must be 0 or more"),
        ({"loss_scale": "norm"}, "loss_scale='norm' is unknown; use one of none, layer_variance"),
        ({"objective": "x"}, "objective='x' is unknown"),
        ({"blocks_share": 1.5}, r"blocks_share=1\.5 must lie between 0 and 1"),
        ({"teacher_forcing_start": -0.1}, r"teacher_forcing_start=-0\.1 must lie between 0 and 1"),
        ({"teacher_forcing_share": 2.0}, r"teacher_forcing_share=2\.0 must lie between 0 and 1"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0 must be positive"),
        ({"loss_scale_images": 1}, "loss_scale_images=1: a variance needs at least 2 images"),
        ({"end_to_end_weights": [1.0, 2.0]}, r"end_to_end_weights=\[1\.0, 2\.0\]: give three weights"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
            "use_reentrant=True gives weight-tied blocks wrong or no gradients",
        ),
    ],
)
def test_wrong_values_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_one_weight_means_all_tokens_alike():
    args = make(preset="paper", last_block_weights=[1.0])
    assert args.objective_for("blocks").last_block_weights is None
    assert args.objective_for("end_to_end").end_to_end_weights == {"cls": 0.45, "registers": 0.1, "patch": 0.45}


@pytest.mark.parametrize("feature", ["amx_bf16", "avx512_bf16", None])
def test_bfloat16_is_the_default_where_the_processor_has_it(feature, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {feature: True}, raising=False)
    make = functools.partial(DistillationArguments, output_dir=str(tmp_path), report_to="none")
    assert make(use_cpu=True).bf16 is (feature is not None)
    assert make().bf16 is (feature is not None)
    assert make().use_cpu
    assert make(bf16=False).bf16 is False
    assert make(bf16=True).bf16 is True
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert make().bf16 is False
