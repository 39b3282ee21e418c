"""The trainer: resuming, clipping, what is saved, evaluation without labels, and a teacher that stays out of it all."""

import json
import shutil

import pytest
import torch
from transformers import TrainerCallback

from raptor_hf import DistillationArguments, RaptorDistillationTrainer, RaptorModel
from raptor_hf.checkpoints import last_complete_checkpoint
from raptor_hf.data import dinov2_processor, load_images


class StopAt(TrainerCallback):
    """Ends a run early, as an interruption between two steps would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


class GradNorms(TrainerCallback):
    """Gradient norms by block before the optimiser's step."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.norms.append(
            [
                torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in block.parameters()])).item()
                for block in model.raptor.blocks
            ]
        )


def assert_same(one, other):
    own, expected = one.state_dict(), other.state_dict()
    assert own.keys() == expected.keys()
    assert [name for name in own if not torch.equal(own[name], expected[name])] == []


# ---- training and resuming ----


def test_both_stages_train_and_leave_their_models(make_trainer, tmp_path):
    trainer = make_trainer(eval_strategy="steps", eval_steps=2, learning_rate=1e-3)
    before = trainer.evaluate()
    result = trainer.train()
    after = trainer.evaluate()
    assert result.global_step == 4
    assert after["eval_r2"] > before["eval_r2"]
    assert [entry["stage"] for entry in trainer.history if "loss" in entry] == ["blocks"] * 2 + ["end_to_end"] * 2
    assert [entry["step"] for entry in trainer.history if "loss" in entry] == [1, 2, 3, 4]
    for stage in ("blocks", "end_to_end"):
        record = json.loads((tmp_path / "run" / stage / "stage.json").read_text())
        assert record["steps"] == 2
        assert (tmp_path / "run" / stage / "model" / "model.safetensors").is_file()
    assert_same(RaptorModel.from_pretrained(tmp_path / "run" / "end_to_end" / "model"), trainer.raptor)
    first = RaptorModel.from_pretrained(tmp_path / "run" / "blocks" / "model")
    assert not torch.equal(first.blocks[0].mlp.fc1.weight, trainer.raptor.blocks[0].mlp.fc1.weight)


@pytest.mark.parametrize("options", [{"stage": "blocks"}, {"stage": "end_to_end", "input_noise_std": 0.1}])
def test_resumed_run_is_bit_equal(make_trainer, options):
    straight = make_trainer("straight", **options)
    straight.train()
    make_trainer("broken", callbacks=[StopAt(2)], **options).train()
    resumed = make_trainer("broken", **options)
    assert resumed.train(resume_from_checkpoint=True).global_step == 4
    assert_same(resumed.raptor, straight.raptor)
    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (straight, resumed)
    ]
    assert losses[0] == losses[1]


def test_noise_of_every_step_differs(make_trainer):
    trainer = make_trainer(gradient_accumulation_steps=2)
    seeds = [trainer._noise_seed() for _ in range(2)]
    trainer.state.global_step = 1
    assert len({*seeds, trainer._noise_seed(), trainer._noise_seed()}) == 4


def test_both_stages_resume_in_the_right_one(make_trainer, tmp_path):
    straight = make_trainer("straight")
    straight.train()
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    (tmp_path / "broken" / "end_to_end" / "stage.json").unlink()
    shutil.rmtree(tmp_path / "broken" / "end_to_end" / "checkpoint-2")
    marker = tmp_path / "broken" / "blocks" / "checkpoint-2" / "optimizer.pt"
    age = marker.stat().st_mtime_ns
    resumed = make_trainer("broken")
    resumed.train(resume_from_checkpoint=True)
    assert_same(resumed.raptor, straight.raptor)
    assert marker.stat().st_mtime_ns == age  # stage 1 was not run again
    assert [entry["step"] for entry in resumed.history if "loss" in entry] == [1, 2, 3, 4]


def test_a_fresh_run_does_not_take_what_an_earlier_one_left(make_trainer):
    first = make_trainer("run")
    first.train()
    again = make_trainer("run", learning_rate=1e-3)
    again.train()
    assert not torch.equal(again.raptor.blocks[0].mlp.fc1.weight, first.raptor.blocks[0].mlp.fc1.weight)


def test_half_written_checkpoints_are_not_resumed_and_go(make_trainer, tmp_path):
    make_trainer(stage="end_to_end").train()
    run = tmp_path / "run"
    assert last_complete_checkpoint(run) == str(run / "checkpoint-4")
    (run / "checkpoint-4" / "trainer_state.json").write_text('{"global_step": 4')
    (run / "checkpoint-3" / "rng_state.pth").unlink()
    assert last_complete_checkpoint(run) == str(run / "checkpoint-2")
    assert not (run / "checkpoint-4").exists()
    assert not (run / "checkpoint-3").exists()
    assert last_complete_checkpoint(tmp_path / "nothing") is None


@pytest.mark.parametrize("stage", ["blocks", "end_to_end"])
def test_muon_resumes_bit_for_bit(stage, make_trainer):
    options = {"stage": stage, "block_optimizer": "muon", "input_noise_std": 0.01}
    through = make_trainer("through", **options)
    through.train()
    make_trainer("resumed", callbacks=[StopAt(2)], **options).train()
    resumed = make_trainer("resumed", **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert_same(resumed.raptor, through.raptor)
    adamw = make_trainer("adamw", stage=stage, input_noise_std=0.01, block_optimizer="adamw")
    adamw.train()
    assert not torch.equal(adamw.raptor.blocks[0].mlp.fc1.weight, through.raptor.blocks[0].mlp.fc1.weight)


def test_muon_steps_the_matrices_and_adamw_the_rest(make_trainer):
    trainer = make_trainer(block_optimizer="muon", weight_decay=0.2)
    groups = trainer.create_optimizer().param_groups
    kinds = {group["num_parts"]: ("momentum" in group, "betas" in group, group["weight_decay"]) for group in groups}
    assert kinds == {3: (True, False, 0.2), 1: (True, False, 0.2), 0: (False, True, 0.0)}
    assert {group["lr"] for group in groups} == {1e-2}


def test_muon_is_refused_where_parameters_are_sharded(make_trainer):
    trainer = make_trainer(block_optimizer="muon")
    trainer.is_fsdp_enabled = True
    with pytest.raises(ValueError, match="block_optimizer='muon' needs whole matrices"):
        trainer.create_optimizer()


def test_steps_are_shared_between_the_stages(make_trainer):
    stages = make_trainer(max_steps=10, blocks_share=0.3).args.stage_arguments()
    assert {stage: args.max_steps for stage, args in stages.items()} == {"blocks": 3, "end_to_end": 7}
    assert list(make_trainer(blocks_share=0.0).args.stage_arguments()) == ["end_to_end"]
    for steps, share in ((2, 0.1), (2, 0.9), (3, 0.01)):
        stages = make_trainer(max_steps=steps, blocks_share=share).args.stage_arguments()
        assert sum(args.max_steps for args in stages.values()) == steps
    by_epoch = make_trainer(max_steps=-1, num_train_epochs=4.0, blocks_share=0.25).args.stage_arguments()
    assert {stage: args.num_train_epochs for stage, args in by_epoch.items()} == {"blocks": 1.0, "end_to_end": 3.0}


# ---- gradients ----


@pytest.mark.parametrize("stage", ["blocks", "end_to_end"])
def test_accumulation_gives_the_gradient_and_loss_of_one_batch(make_trainer, stage):
    values = []
    for size, steps in ((8, 1), (2, 4)):
        norms = GradNorms()
        trainer = make_trainer(
            f"{size}", stage=stage, max_steps=1, callbacks=[norms],
            per_device_train_batch_size=size, gradient_accumulation_steps=steps,
        )  # fmt: skip
        trainer.train()
        values.append((norms.norms[0], trainer.state.log_history[0]["loss"]))
    assert values[0][0] == pytest.approx(values[1][0], rel=1e-4)
    assert values[0][1] == pytest.approx(values[1][1], rel=1e-4)


def test_clipping_is_per_block_in_stage_one(make_trainer):
    free, clipped = GradNorms(), GradNorms()
    make_trainer("free", stage="blocks", max_steps=1, callbacks=[free]).train()
    limit = min(free.norms[0]) * 0.5
    make_trainer("clipped", stage="blocks", max_steps=1, max_grad_norm=limit, callbacks=[clipped]).train()
    assert clipped.norms[0] == pytest.approx([limit, limit], rel=1e-4)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_joint_stage_one_equals_blocks_trained_apart(make_trainer, clip):
    joint = make_trainer("joint", stage="blocks", max_grad_norm=clip)
    joint.train()
    for block in (0, 1):
        alone = make_trainer(f"alone{block}", stage="blocks", blocks=[block], max_grad_norm=clip)
        alone.train()
        assert_same(alone.raptor.blocks[block], joint.raptor.blocks[block])
        other = make_trainer("fresh").raptor.blocks[1 - block]
        assert_same(alone.raptor.blocks[1 - block], other)


def test_frozen_embeddings_with_activation_checkpointing(make_trainer):
    plain, recomputed = GradNorms(), GradNorms()
    make_trainer("plain", max_steps=1, stage="end_to_end", callbacks=[plain]).train()
    make_trainer(
        "recomputed", max_steps=1, stage="end_to_end", callbacks=[recomputed], activation_checkpointing=True
    ).train()
    assert min(plain.norms[0]) > 0
    assert recomputed.norms[0] == pytest.approx(plain.norms[0], rel=1e-6)


def test_weight_decay_acts_on_the_blocks_matrices_alone(make_trainer):
    trainer = make_trainer()
    names = set(trainer.get_decay_parameter_names(trainer.model))
    prefix = "raptor.blocks.0."
    assert {name.removeprefix(prefix) for name in names if name.startswith(prefix)} == {
        "attention.qkv.weight",
        "attention.proj.weight",
        "mlp.fc1.weight",
        "mlp.fc2.weight",
    }
    assert all(name.startswith("raptor.blocks.") for name in names)


# ---- teacher ----


def test_the_teacher_is_in_no_file_and_never_changes(make_trainer, make_teacher, images, tmp_path):
    noisy = make_teacher(
        num_hidden_layers=4, image_size=28, hidden_dropout_prob=0.5, image_processor=dinov2_processor(28)
    )
    before = {name: value.clone() for name, value in noisy.model.state_dict().items()}
    args = DistillationArguments(
        output_dir=str(tmp_path / "noisy"), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=2,
        stage="end_to_end", per_device_train_batch_size=4, save_steps=2, learning_rate=1e-2,
    )  # fmt: skip
    trainer = RaptorDistillationTrainer(RaptorModel.from_teacher(noisy, (2, 2)), noisy, args, images)
    noisy.model.train()  # as a careless caller would leave it
    pixels = images[0]["pixel_values"][None]
    assert torch.equal(noisy.hidden_states(pixels)[-1], noisy.hidden_states(pixels)[-1])
    trainer.train()
    assert not noisy.model.training
    assert all(torch.equal(value, before[name]) for name, value in noisy.model.state_dict().items())
    weights = (tmp_path / "noisy" / "checkpoint-2" / "model.safetensors").stat().st_size
    assert weights < 1.2 * 4 * trainer.raptor.num_parameters()
    groups = trainer.optimizer.param_groups
    optimised = sum(parameter.numel() for group in groups for parameter in group["params"])
    assert optimised == sum(parameter.numel() for parameter in trainer.raptor.blocks.parameters())


def test_students_that_do_not_fit_are_named(make_trainer, make_teacher, images, tmp_path):
    other = make_teacher(num_hidden_layers=3, image_size=28)
    student = RaptorModel.from_teacher(other, (2, 1))
    with pytest.raises(ValueError, match="student with num_hidden_layers=3 for a teacher with 4"):
        RaptorDistillationTrainer(
            student, make_trainer().teacher, DistillationArguments(output_dir=str(tmp_path)), images
        )


# ---- data ----


def test_sets_smaller_than_a_batch_and_missing_ones_are_named(make_trainer, images):
    with pytest.raises(ValueError, match="3 training images are fewer than one batch of 4"):
        make_trainer(train=images[:3]).train()
    with pytest.raises(ValueError, match="training needs a train_dataset"):
        make_trainer(train=None).train()


def test_image_datasets_go_through_the_processor(make_trainer):
    digits = load_images("digits", split="train", max_images=8)
    trainer = make_trainer(train=digits, evaluation=digits, max_steps=2)
    assert trainer.train().global_step == 2
    assert trainer.train_dataset[0]["pixel_values"].shape == (3, 28, 28)


def test_images_without_a_processor_are_named(make_teacher, tmp_path):
    bare = make_teacher()
    student = RaptorModel.from_teacher(bare, (2, 1))
    digits = load_images("digits", split="train", max_images=8)
    with pytest.raises(ValueError, match="a dataset of images needs a processing_class"):
        RaptorDistillationTrainer(student, bare, DistillationArguments(output_dir=str(tmp_path), use_cpu=True), digits)


# ---- evaluation ----


def test_evaluation_without_labels_counts_every_image_once(make_trainer, images):
    trainer = make_trainer(evaluation=images[:6], per_device_eval_batch_size=4)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] > 0
    assert trainer.fidelity.num_images == 6
    assert metrics["eval_r2"] == pytest.approx(sum(metrics[f"eval_r2_layer_{layer}"] for layer in range(1, 5)) / 4)
    whole = make_trainer("whole", evaluation=images[:6], per_device_eval_batch_size=6).evaluate()
    assert whole["eval_r2"] == pytest.approx(metrics["eval_r2"], abs=1e-6)


def test_a_perfect_student_has_r2_one(make_trainer):
    metrics = make_trainer(repeats=(1, 1, 1, 1)).evaluate()
    assert metrics["eval_r2"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["eval_cosine"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("metric", ["eval_loss", "eval_r2"])
def test_best_checkpoint_is_loaded_at_the_end(make_trainer, metric):
    trainer = make_trainer(
        stage="end_to_end", eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True,
        metric_for_best_model=metric, learning_rate=1e-1, max_steps=4,
    )  # fmt: skip
    trainer.train()
    values = [entry[metric] for entry in trainer.state.log_history if metric in entry]
    best = max(values) if metric == "eval_r2" else min(values)
    assert trainer.state.best_metric == best
    assert trainer.evaluate()[metric] == pytest.approx(best, rel=1e-5)


def test_predict_returns_small_features(make_trainer, images, teacher):
    trainer = make_trainer()
    predictions = trainer.predict(images[:6]).predictions
    assert predictions.shape == (6, 64)
    with torch.no_grad():
        last = trainer.raptor(torch.stack([item["pixel_values"] for item in images[:6]])).last_hidden_state
    torch.testing.assert_close(torch.tensor(predictions), teacher.layout.pool(last), rtol=1e-4, atol=1e-5)


def test_every_component_is_logged_by_name(make_trainer):
    trainer = make_trainer(stage="blocks", preset="research", max_steps=8, per_device_train_batch_size=2)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert {"tf", "cls", "reg", "patch", "lambda", "grad_norm", "learning_rate"} <= set(entries[0])
    assert {"ar", "cls", "reg", "patch", *(f"r2_layer_{layer}" for layer in range(1, 5))} <= set(entries[-1])
    assert [entry["lambda"] for entry in entries[:3]] == [1.0, 0.5, 0.0]
    assert "tf" not in entries[-1]


def test_shared_variance_gives_every_group_the_layers_own(make_trainer, tmp_path):
    trainer = make_trainer(loss_scale="shared_variance", stage="end_to_end", max_steps=1)
    trainer.train()
    stored = json.loads((tmp_path / "run" / "loss_scale.json").read_text())
    assert stored["cls"] != stored["all"]
    assert trainer.model.loss_scale == {group: stored["all"] for group in ("all", "cls", "registers", "patch")}


def test_loss_scale_is_computed_once_and_stored_with_the_run(make_trainer, tmp_path):
    trainer = make_trainer(loss_scale="layer_variance")
    trainer.train()
    stored = json.loads((tmp_path / "run" / "loss_scale.json").read_text())
    assert set(stored) == {"all", "cls", "registers", "patch"}
    assert trainer.model.loss_scale == stored
    assert not (tmp_path / "run" / "blocks" / "loss_scale.json").exists()
    path = tmp_path / "run" / "loss_scale.json"
    path.write_text(json.dumps({group: [7.0] * 4 for group in stored}))
    again = make_trainer(loss_scale="layer_variance")
    again.train(resume_from_checkpoint=True)  # a run that is gone on with keeps what it began with
    assert again.model.loss_scale["cls"] == [7.0] * 4


# ---- streams and changed batches ----


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def test_a_stream_needs_steps_and_runs_exactly_these(make_trainer, images):
    with pytest.raises(ValueError, match=r"needs a number of steps; set max_steps \(--max_steps\)"):
        make_trainer(train=Stream(images), max_steps=-1).train()
    trainer = make_trainer(train=Stream(images), max_steps=3, stage="end_to_end")
    assert trainer.train().global_step == 3


def test_resuming_with_another_batch_size_keeps_the_number_of_steps(make_trainer):
    options = {"stage": "end_to_end", "max_steps": -1, "num_train_epochs": 2.0}
    first = make_trainer(
        "run", callbacks=[StopAt(2)], per_device_train_batch_size=1, gradient_accumulation_steps=4, **options
    )
    first.train()
    resumed = make_trainer("run", per_device_train_batch_size=4, gradient_accumulation_steps=1, **options)
    assert resumed.train(resume_from_checkpoint=True).global_step == first.state.max_steps == 8
