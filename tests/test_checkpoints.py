"""Which checkpoint is gone on with."""

import json

import pytest

from raptor_hf.checkpoints import last_complete_checkpoint

FILES = ("optimizer.pt", "scheduler.pt")


@pytest.fixture
def make_checkpoint(tmp_path):
    def factory(step, ranks=1):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        states = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
        for name in (*FILES, *states):
            (folder / name).write_bytes(b"x")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        return folder

    return factory


def test_the_highest_number_wins_not_the_last_name(make_checkpoint, tmp_path):
    for step in (9, 10, 2):
        make_checkpoint(step)
    (tmp_path / "checkpoint-best").mkdir()  # of somebody else
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert (tmp_path / "checkpoint-best").is_dir()


@pytest.mark.parametrize("missing", [*FILES, "rng_state.pth", "trainer_state.json"])
def test_incomplete_ones_are_passed_over_and_go(missing, make_checkpoint, tmp_path):
    make_checkpoint(1)
    (make_checkpoint(2) / missing).unlink()
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    assert not (tmp_path / "checkpoint-2").exists() or missing == "optimizer.pt"


def test_a_weights_only_folder_is_left_alone(make_checkpoint, tmp_path):
    (make_checkpoint(2) / "optimizer.pt").unlink()
    assert last_complete_checkpoint(tmp_path) is None
    assert (tmp_path / "checkpoint-2").is_dir()


def test_every_rank_must_have_left_its_random_state(make_checkpoint, tmp_path):
    make_checkpoint(1, ranks=2)
    (make_checkpoint(2, ranks=2) / "rng_state_1.pth").unlink()
    assert last_complete_checkpoint(tmp_path, world_size=2) == str(tmp_path / "checkpoint-1")


def test_no_folder(tmp_path):
    assert last_complete_checkpoint(tmp_path / "nothing") is None
