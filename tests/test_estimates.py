"""What a run is said to take is what it takes."""

import pytest
import torch

from raptor_hf import RaptorModel, Teacher
from raptor_hf.data import dinov2_processor
from raptor_hf.estimates import estimate_stages, num_steps


def estimates(trainer, num_images=16, **options):
    """Estimates of a trainer's own run."""
    return estimate_stages(
        trainer.teacher, trainer.raptor, trainer.args, num_images=num_images, image_size=(28, 28), **options
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_train_epochs": 3.0},
        {"num_train_epochs": 1.5, "gradient_accumulation_steps": 3},
        {"num_train_epochs": 2.0, "per_device_train_batch_size": 5},
        {"num_train_epochs": 2.0, "per_device_train_batch_size": 5, "dataloader_drop_last": False},
        {"max_steps": 3},
    ],
)
def test_steps_are_the_trainers(options, make_trainer):
    trainer = make_trainer(evaluation=None, stage="end_to_end", save_strategy="no", **{"max_steps": -1, **options})
    assert num_steps(trainer.args, 16) == trainer.train().global_step


def test_both_stages_share_the_steps(make_trainer):
    stages = estimates(make_trainer(stage="both", max_steps=10, blocks_share=0.3))
    assert [(stage.stage, stage.steps, stage.images) for stage in stages] == [("blocks", 3, 12), ("end_to_end", 7, 28)]
    for stage in stages:
        assert stage.seconds == pytest.approx(stage.steps * stage.seconds_per_step)
        assert stage.seconds_per_step > 0


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("limit", [1, 2, None])
def test_disk_is_what_a_run_leaves(limit, optimizer, make_trainer, tmp_path):
    options = {"stage": "blocks", "max_steps": 4, "block_optimizer": optimizer, "save_total_limit": limit}
    (estimate,) = estimates(make_trainer("planned", **options))
    trainer = make_trainer(evaluation=None, **options)
    trainer.train()
    trainer.save_model(str(tmp_path / "run" / "model"))
    kept = sorted((tmp_path / "run").rglob("model.safetensors")) + sorted((tmp_path / "run").rglob("optimizer.pt"))
    assert len(kept) == 2 * (limit or 4) + 1
    largest = max(path.stat().st_size for path in kept if path.name == "model.safetensors")
    largest += max(path.stat().st_size for path in kept if path.name == "optimizer.pt")
    being_written = 0 if limit is None else largest
    assert estimate.disk == pytest.approx(sum(path.stat().st_size for path in kept) + being_written, rel=0.1)


def test_memory_grows_with_the_batch_and_shrinks_with_checkpointing(make_trainer):
    def memory(batch, **options):
        trainer = make_trainer(stage="end_to_end", per_device_train_batch_size=batch, **options)
        return estimates(trainer)[0].memory

    small, middle, large = memory(2), memory(4), memory(8)
    assert large - middle == 2 * (middle - small) > 0
    assert memory(8, activation_checkpointing=True) < large


def test_memory_kept_for_the_backward_pass_is_what_autograd_holds(make_trainer, images):
    batch, trainer = 8, make_trainer(stage="end_to_end", per_device_train_batch_size=8, block_optimizer="adamw")
    (estimate,) = estimates(trainer)
    states = trainer.teacher.hidden_states(torch.stack([image["pixel_values"] for image in images[:batch]]))
    given = {value.untyped_storage().data_ptr() for value in (*states, *trainer.model.parameters())}
    graph, nodes, held = set(), [trainer.model.train()(states).loss.grad_fn], {}
    while nodes:  # every tensor that a node of the graph has saved
        node = nodes.pop()
        if node is None or node in graph:
            continue
        graph.add(node)
        nodes.extend(parent for parent, _ in node.next_functions)
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            for tensor in value if isinstance(value, tuple | list) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                    held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    student = sum(value.nbytes for value in trainer.raptor.state_dict().values())
    trained = sum(value.nbytes for value in trainer.raptor.blocks.parameters())
    teacher = sum(value.nbytes for value in trainer.teacher.model.state_dict().values())
    rest = teacher + student + 3 * trained + sum(state.nbytes for state in states)  # gradients and AdamW's two moments
    assert estimate.memory - rest == pytest.approx(sum(held.values()), rel=0.02)


def test_cached_states_are_not_computed(make_trainer, monkeypatch):
    trainer, calls = make_trainer(stage="end_to_end"), []
    original = Teacher.hidden_states
    monkeypatch.setattr(Teacher, "hidden_states", lambda self, pixels: calls.append(1) or original(self, pixels))
    estimates(trainer, cached=True)
    assert len(calls) == 1  # the states that stand for those that are read
    estimates(trainer)
    assert len(calls) > 5


def test_what_cannot_be_counted_is_said(make_trainer):
    args = make_trainer(max_steps=-1, num_train_epochs=1.0).args
    with pytest.raises(ValueError, match=r"number of images is not known; give the number of steps \(--max_steps\)"):
        num_steps(args, None)
    with pytest.raises(ValueError, match="3 training images are fewer than one batch of 4"):
        num_steps(args, 3)


def test_an_untrained_teacher_gives_the_same_estimate(make_trainer, teacher, tmp_path):
    teacher.model.save_pretrained(tmp_path / "teacher")
    dinov2_processor(28).save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "model.safetensors").unlink()
    outline = Teacher.untrained(tmp_path / "teacher")
    assert outline.image_processor.crop_size["height"] == 28
    assert outline.name_or_path == str(tmp_path / "teacher")
    trainer = make_trainer(stage="end_to_end")
    own, other = (
        estimate_stages(each, RaptorModel.from_teacher(each, (2, 2)), trainer.args, num_images=16, image_size=(28, 28))
        for each in (teacher, outline)
    )
    assert own[0].memory == other[0].memory
    assert own[0].disk == other[0].disk
