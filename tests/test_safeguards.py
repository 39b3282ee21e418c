"""How a run ends that cannot go on, and that nothing saved before is lost."""

import os
import resource
import signal

import pytest
import torch
from transformers import TrainerCallback

from raptor_hf import RaptorModel
from raptor_hf.checkpoints import last_complete_checkpoint
from raptor_hf.safeguards import SIGTERM_EXIT, FiniteLoss, TrainingStopped, saving

OPTIONS = {"stage": "end_to_end", "block_optimizer": "adamw"}  # whose state is larger than the weights


class AtStep(TrainerCallback):
    """Does something after a step, once."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == self.step:
            self.step = None
            self.action(model)


def spoil(model):
    with torch.no_grad():
        model.raptor.blocks[0].mlp.fc1.bias[0] = torch.nan


def straight(make_trainer):
    trainer = make_trainer("straight", **OPTIONS)
    trainer.train()
    return trainer.raptor.state_dict()


def assert_resumes(make_trainer, expected):
    resumed = make_trainer(**OPTIONS)
    assert resumed.train(resume_from_checkpoint=True).global_step == 4
    own = resumed.raptor.state_dict()
    assert [name for name in own if not torch.equal(own[name], expected[name])] == []


# ---- a loss that is no number ----


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_loss_that_is_not_finite_is_remembered(value):
    check = FiniteLoss()
    assert not check.is_broken(lambda count: count)
    for loss in (1.0, value, 2.0):
        check.update(torch.tensor(loss))
    assert check.is_broken(lambda count: count)


def test_weights_are_looked_at_too():
    check = FiniteLoss()
    check.update(torch.tensor(1.0))
    assert not check.is_broken(lambda count: count, [torch.ones(3)])
    assert check.is_broken(lambda count: count, [torch.ones(3), torch.tensor([0.0, torch.nan])])


def test_a_run_that_breaks_names_its_last_good_checkpoint_and_goes_on_from_there(make_trainer, tmp_path):
    expected = straight(make_trainer)
    trainer = make_trainer(**OPTIONS, callbacks=[AtStep(2, spoil)], save_steps=2, logging_steps=4)
    with pytest.raises(TrainingStopped, match=r"not a finite number.*no complete checkpoint.*learning_rate"):
        trainer.train()
    assert last_complete_checkpoint(tmp_path / "run") is None  # the save of step 2 saw the weight
    trainer = make_trainer(**OPTIONS, callbacks=[AtStep(3, spoil)])
    with pytest.raises(TrainingStopped, match=r"at step 3.*last good checkpoint is checkpoint-2\."):
        trainer.train()
    assert_resumes(make_trainer, expected)


def test_a_break_between_two_saves_is_seen_at_the_log(make_trainer):
    trainer = make_trainer(**OPTIONS, callbacks=[AtStep(1, spoil)], save_strategy="no", logging_steps=2)
    with pytest.raises(TrainingStopped, match="at step 2"):
        trainer.train()


# ---- a full disk ----


@pytest.fixture
def small_files():
    """Limits the size of a file, as a quota does: the real error of the real writers."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [10_000, 160_000], ids=["weights", "optimizer"])
def test_a_full_disk_stops_with_one_line_and_the_run_goes_on(size, make_trainer, small_files, tmp_path):
    expected = straight(make_trainer)
    fill = AtStep(3, lambda model: small_files(size))
    with pytest.raises(TrainingStopped, match=r"step 3 could not be written.*checkpoint-2\. Make room"):
        make_trainer(**OPTIONS, callbacks=[fill]).train()
    small_files(resource.RLIM_INFINITY)
    assert (tmp_path / "run" / "checkpoint-3").is_dir()  # half of it
    assert_resumes(make_trainer, expected)


def test_other_errors_pass_through():
    with pytest.raises(KeyError), saving("run", 1):
        raise KeyError("x")
    with pytest.raises(TrainingStopped, match="as it was"), saving("run", 1):
        raise TrainingStopped("as it was")


# ---- SIGTERM ----


@pytest.mark.parametrize("stage", ["both", "end_to_end"])
def test_sigterm_saves_and_the_run_goes_on(stage, make_trainer, tmp_path):
    trainer = make_trainer("straight", stage=stage)
    trainer.train()
    before = signal.getsignal(signal.SIGTERM)
    terminate = AtStep(1, lambda model: os.kill(os.getpid(), signal.SIGTERM))
    stopped = make_trainer(stage=stage, callbacks=[terminate], save_steps=4)
    with pytest.raises(SystemExit) as stop:
        stopped.train()
    assert stop.value.code == SIGTERM_EXIT == 143
    assert signal.getsignal(signal.SIGTERM) is before
    folder = tmp_path / "run" / ("blocks" if stage == "both" else "")
    assert last_complete_checkpoint(folder) == str(folder / "checkpoint-1")
    assert not (folder / "stage.json").exists()
    resumed = make_trainer(stage=stage, save_steps=4)
    resumed.train(resume_from_checkpoint=True)
    own, expected = resumed.raptor.state_dict(), trainer.raptor.state_dict()
    assert all(torch.equal(own[name], expected[name]) for name in own)
    model = tmp_path / "run" / "end_to_end" / "model" if stage == "both" else None
    if model is not None:
        assert torch.equal(RaptorModel.from_pretrained(model).layernorm.weight, own["layernorm.weight"])
