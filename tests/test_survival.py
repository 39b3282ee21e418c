"""Runs that are killed with signal 9, at chosen and at random moments: the same command goes on and ends bit-equal."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from raptor_hf.data import dinov2_processor

STEPS = 60


@pytest.fixture
def command(make_teacher, tmp_path):
    """Arguments of a run on 24 small photos that saves at every second step, without its output folder."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in ("a", "b"):
            folder = tmp_path / "photos" / split / label
            folder.mkdir(parents=True)
            for index in range(6):
                Image.fromarray(rng.integers(0, 255, (40, 36, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    made = make_teacher(num_hidden_layers=4, image_size=28)
    made.model.save_pretrained(tmp_path / "teacher")
    dinov2_processor(28).save_pretrained(tmp_path / "teacher")
    return [
        sys.executable, "-m", "raptor_hf", "distill", str(tmp_path / "teacher"), "--dataset", str(tmp_path / "photos"),
        "--num-blocks", "2", "--max-steps", str(STEPS), "--blocks-share", "0.5", "--per-device-train-batch-size", "4",
        "--save-steps", "2", "--logging-steps", "2", "--input-noise-std", "0.05", "--use-cpu", "--output-dir",
    ]  # fmt: skip


def start(command, folder):
    return subprocess.Popen(
        [*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def kill_when(happens, command, folder):
    """Starts the run and kills it as soon as `happens(folder)`; whether it was still alive then."""
    run = start(command, folder)
    while run.poll() is None and not happens(folder):
        time.sleep(0.0005)
    alive = run.poll() is None
    run.send_signal(signal.SIGKILL)
    run.communicate()
    return alive


def finish(command, folder):
    run = start(command, folder)
    _, error = run.communicate(timeout=300)
    assert run.returncode == 0, error
    return error


def is_saving(stage, first=1):
    """Whether a checkpoint of the stage, from the `first` step on, is half-written."""

    def happens(folder):
        folders = [path for path in (folder / stage).glob("checkpoint-*") if int(path.name.split("-")[1]) >= first]
        return any(not (path / "trainer_state.json").exists() for path in folders)

    return happens


def assert_equal_runs(one, other):
    for part in ("blocks/model", "end_to_end/model", "model"):
        assert (one / part / "model.safetensors").read_bytes() == (other / part / "model.safetensors").read_bytes()
    histories = []
    for folder in (one, other):
        (model,) = json.loads((folder / "results.json").read_text())["models"]
        logs = [entry for entry in model["training"]["history"] if "grad_norm" in entry]
        histories.append([(entry["stage"], entry["step"], entry["loss"]) for entry in logs])
    assert histories[0] == histories[1]
    assert len(histories[0]) == STEPS // 2


def test_killed_while_saving_and_between_the_stages(command, tmp_path):
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    assert kill_when(is_saving("blocks", first=5), command, killed)
    assert kill_when(lambda folder: (folder / "blocks" / "stage.json").exists(), command, killed)
    assert "Stage blocks is finished already" in finish(command, killed)
    finish(command, straight)
    assert_equal_runs(killed, straight)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_ten_times(seed, command, tmp_path):
    rng = random.Random(seed)
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    finish(command, straight)
    moments = [
        lambda folder: (folder / "phases.json").exists(),
        lambda folder: (folder / "loss_scale.json").exists(),
        is_saving("blocks"),
        is_saving("blocks", first=rng.randint(5, 20)),
        lambda folder: (folder / "blocks" / "model" / "config.json").exists(),
        lambda folder: (folder / "blocks" / "stage.json").exists(),
        is_saving("end_to_end"),
        is_saving("end_to_end", first=rng.randint(5, 20)),
        lambda folder: (folder / "end_to_end" / "stage.json").exists(),
        lambda folder: (folder / "model" / "model.safetensors").exists(),
    ]
    for happens in moments:
        delay = rng.choice([0.0, 0.0, rng.random() * 0.3])

        def after(folder, happens=happens, delay=delay):
            if not happens(folder):
                return False
            time.sleep(delay)
            return True

        kill_when(after, command, killed)
    finish(command, killed) if not (killed / "results.json").exists() else None
    assert_equal_runs(killed, straight)
