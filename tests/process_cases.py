"""What `test_processes.py` runs: each case alone in one process, and as this script in two that speak over gloo.

A case takes a folder and the number of processes, does the same work with the same global batches however many there
are, and returns tensors and numbers. Run as a script, each process leaves what its cases returned in `FOLDER/RANK.pt`.
"""

import os
import subprocess
import sys
from pathlib import Path

import datasets
import torch
from accelerate import PartialState
from torch.distributed.fsdp import fully_shard
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel, TrainerCallback

import dense_sets
from raptor_hf import DistillationArguments, RaptorDistillationTrainer, RaptorModel, Teacher
from raptor_hf.activations import cache_activations
from raptor_hf.cli import main
from raptor_hf.data import PixelDataset, dinov2_processor, load_images
from raptor_hf.dense_data import load_depth, load_segmentation
from raptor_hf.dense_probes import DEPTH, DEPTH_ARGUMENTS, SEGMENTATION, SEGMENTATION_ARGUMENTS, DenseProbe, scaled
from raptor_hf.distillation import RaptorForDistillation
from raptor_hf.probes import LinearProbe, ProbeArguments
from raptor_hf.results import read_json
from raptor_hf.safeguards import TrainingStopped
from raptor_hf.streams import load_stream

GLOBAL_BATCH = 8


def make_teacher():
    """A teacher of 4 layers for images of 28 pixels, the same in every process."""
    torch.manual_seed(0)
    config = Dinov2WithRegistersConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=4, image_size=28, patch_size=14, num_register_tokens=4
    )
    model = Dinov2WithRegistersModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return Teacher(model)


def make_images(count, seed=3):
    """Processed images of 28 pixels."""
    generator = torch.Generator().manual_seed(seed)
    return [{"pixel_values": torch.randn(3, 28, 28, generator=generator)} for _ in range(count)]


def make_trainer(folder, processes, *, train=None, evaluation=None, callbacks=None, blocks=None, **options):
    """A trainer whose batch over all processes is `GLOBAL_BATCH`."""
    options = {
        "stage": "end_to_end", "max_steps": 1, "learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 0.0,
        "block_optimizer": "adamw", "loss_scale_images": 8, "save_strategy": "no", "logging_steps": 1, "bf16": False,
        "per_device_train_batch_size": GLOBAL_BATCH // processes, "per_device_eval_batch_size": 2, **options,
    }  # fmt: skip
    args = DistillationArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
        **options,
    )  # fmt: skip
    assert args.world_size == processes
    teacher = make_teacher()
    torch.manual_seed(5)
    student = RaptorModel.from_teacher(teacher, (2, 2))
    return RaptorDistillationTrainer(
        student, teacher, args, train or make_images(16), evaluation, blocks=blocks, callbacks=callbacks
    )


class Gradients(TrainerCallback):
    """Keeps the gradients that reach the optimiser."""

    def __init__(self):
        self.of_steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        """Copies them."""
        named = model.named_parameters()
        self.of_steps.append({name: parameter.grad.clone() for name, parameter in named if parameter.requires_grad})


def gradients(folder, processes, *, evaluate_first=False, **options):
    """Gradients of three steps."""
    seen = Gradients()
    trainer = make_trainer(
        folder, processes, callbacks=[seen], evaluation=make_images(4), max_steps=3, learning_rate=1e-3, **options
    )
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    assert processes == 1 or "Distributed" in type(trainer.model_wrapped).__name__
    return {f"{step}.{name}": grad for step, grads in enumerate(seen.of_steps) for name, grad in grads.items()}


def evaluation(folder, processes):
    """Measures and predictions on 5 images in batches of 2 per process."""
    trainer = make_trainer(folder, processes, evaluation=make_images(5))
    metrics = trainer.evaluate()
    features = trainer.predict(make_images(5)).predictions
    kept = {name: value for name, value in metrics.items() if "_r2" in name or name in ("eval_loss", "eval_cosine")}
    return {"num_images": trainer.fidelity.num_images, **kept, "features": torch.as_tensor(features)}


def muon(folder, processes):
    """Weights after three steps of the default optimiser."""
    trainer = make_trainer(folder, processes, block_optimizer="muon", max_steps=3, max_grad_norm=1.0, stage="both")
    trainer.train()
    return {name: value.clone() for name, value in trainer.raptor.blocks.state_dict().items()}


class StopAt(TrainerCallback):
    """Ends a run after its second step."""

    def on_step_end(self, args, state, control, **kwargs):
        """Asks for the end."""
        control.should_training_stop = state.global_step == 2


def resume(folder, processes):
    """Weights of four steps, and of two and two more by the same command, with noise."""
    options = {"max_steps": 4, "input_noise_std": 0.1, "save_strategy": "steps", "save_steps": 1, "stage": "blocks"}
    straight = make_trainer(folder / "straight", processes, **options)
    straight.train()
    make_trainer(folder / "broken", processes, callbacks=[StopAt()], **options).train()
    resumed = make_trainer(folder / "broken", processes, **options)
    resumed.train(resume_from_checkpoint=True)
    return {
        f"{run}.{name}": value.clone()
        for run, trainer in (("straight", straight), ("resumed", resumed))
        for name, value in trainer.raptor.blocks.state_dict().items()
    }


def noise(folder, processes):
    """The seed of this process's noise."""
    return {"seed": make_trainer(folder, processes, input_noise_std=0.1)._noise_seed()}


def broken_image(folder, processes):
    """The message of a run whose last image holds NaN."""
    images = make_images(16)
    images[-1]["pixel_values"][0, 0, 0] = torch.nan
    trainer = make_trainer(
        folder, processes, train=images, max_steps=4, save_strategy="steps", save_steps=1, loss_scale="none"
    )
    try:
        trainer.train()
    except TrainingStopped as error:
        return {"message": str(error)}
    return {"message": None}


def one_image(folder, processes):
    """The message of a run with one image."""
    try:
        make_trainer(folder, processes, train=make_images(1)).train()
    except ValueError as error:
        return {"message": str(error)}
    return {"message": None}


def cache(folder, processes):
    """States of 16 digits in six shards that the processes share out, and the gradients of steps that read them."""
    pixels = PixelDataset(load_images("digits", split="train", max_images=16), dinov2_processor(28))
    written = []
    states = cache_activations(
        make_teacher(), pixels, folder / "cache", batch_size=2, shard_bytes=3 * 2 * 5 * 9 * 32,
        processes=PartialState(cpu=True), progress=lambda batches, total: written.append(total) or batches,
    )  # fmt: skip
    seen = Gradients()
    make_trainer(folder, processes, train=states, callbacks=[seen], max_steps=2, stage="blocks").train()
    grads = {f"{step}.{name}": grad for step, grads in enumerate(seen.of_steps) for name, grad in grads.items()}
    stored = torch.stack([states[index]["hidden_states"] for index in range(16)])
    return {"written": written[0], "states": stored, "gradients": grads}


def sharded(folder, processes):
    """A wrapper whose blocks are sharded by FSDP2: two steps, then the whole student saved by the first process."""
    teacher = make_teacher()
    torch.manual_seed(5)
    student = RaptorModel.from_teacher(teacher, (2, 2))
    model = RaptorForDistillation(student.config, student).train()
    trained = model.raptor.blocks
    if processes > 1:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (processes,))
        for block in trained:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    rank = int(os.environ.get("RANK", "0"))
    for step in range(2):
        batch = torch.stack([item["pixel_values"] for item in make_images(GLOBAL_BATCH, seed=step)])
        size = GLOBAL_BATCH // processes
        states = teacher.hidden_states(batch[rank * size : (rank + 1) * size])
        model(states).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in student.state_dict().items()
    }
    if rank == 0:
        student.save_pretrained(folder / "student", state_dict=dict(whole))  # which is emptied
    return {name: value.clone() for name, value in whole.items()}


def list_stream(images):
    """The images as a stream."""
    rows = {"image": [item["image"] for item in images], "label": images.labels}
    features = datasets.Features(image=datasets.Image(), label=datasets.Value("int64"))
    return datasets.Dataset.from_dict(rows, features).to_iterable_dataset()


def probes(folder, processes, count=5):
    """What each probe finds on `count` images in batches of 2 per process, and the weights of its head."""
    root = folder / os.environ.get("RANK", "0")  # processes that write the same files would meet half of one
    digits = [load_images("digits", split=split, max_images=count) for split in ("train", "test")]
    streams = [load_stream(list_stream(images), shuffle_buffer=0) for images in digits[:1] * 2]
    masks = dense_sets.make_ade(root, train=count, validation=count)
    depths = dense_sets.make_nyu_csv(root, train=count, test=count)
    segmentation = [load_segmentation(masks, split) for split in ("train", "validation")]
    rooms = [load_depth(depths, split) for split in ("train", "test")]
    options = {"num_epochs": 2, "batch_size": 2, "learning_rate": 1e-2, "seeds": (0,)}
    dense = {**options, "image_size": (28, 42)}
    made = {
        "classification": LinearProbe(*digits, ProbeArguments(**options)),
        "cached": LinearProbe(*digits, ProbeArguments(**options, augment="none")),
        "streamed": LinearProbe(*streams, ProbeArguments(**options, augment="none")),
        "segmentation": DenseProbe(SEGMENTATION, *segmentation, scaled(SEGMENTATION_ARGUMENTS, **dense)),
        "masks_cached": DenseProbe(
            SEGMENTATION, *segmentation, scaled(SEGMENTATION_ARGUMENTS, **dense, augment="none", select="best")
        ),
        "depth": DenseProbe(DEPTH, *rooms, scaled(DEPTH_ARGUMENTS, **dense, crop="none")),
    }
    found = {}
    for name, probe in made.items():
        heads, seen, teacher = [], [], make_teacher()
        teacher.model.register_forward_pre_hook(
            lambda model, args, kwargs, seen=seen: seen.extend(kwargs.get("pixel_values", *args)), with_kwargs=True
        )
        result = probe(teacher, dinov2_processor(28), keep=lambda seed, head, heads=heads: heads.append(head))
        weights = {key: value.detach().clone() for key, value in heads[0].state_dict().items()}
        found[name] = {"values": result.to_dict(), "weights": weights, "seen": len(seen)}
    return found


def probe_command(folder, processes):
    """Exit code of a command that a run which stopped after one of two seeds goes on with, and what it measured."""
    argv = [
        "probe", "segmentation", str(folder / "teacher"), "--dataset", str(folder / "ADEChallengeData2016"),
        "--image-size", "28", "--num-epochs", "1", "--batch-size", "2", "--save-heads", "--output-dir",
        str(folder / "run"), "--seeds",
    ]  # fmt: skip
    with PartialState(cpu=True).main_process_first():
        if os.environ.get("RANK", "0") == "0":
            make_teacher().model.save_pretrained(folder / "teacher")
            dinov2_processor(28).save_pretrained(folder / "teacher")
            dense_sets.make_ade(folder, train=3, validation=3)
    codes = []
    for options in (["2"], ["2"], ["1", "--overwrite"]):
        codes.append(main([*argv, *options]))
        PartialState().wait_for_everyone()  # the first process writes what was found
    return {"codes": codes, "probe": read_json(folder / "run" / "results.json")["probe"]["results"]}


CASES = {
    "blocks": lambda *where: gradients(*where, stage="blocks"),
    "end_to_end": gradients,
    "checkpointing": lambda *where: gradients(*where, activation_checkpointing=True),
    "blocks_checkpointing": lambda *where: gradients(*where, stage="blocks", activation_checkpointing=True),
    "evaluated_first": lambda *where: gradients(*where, evaluate_first=True),
    "one_block": lambda *where: gradients(*where, stage="blocks", blocks=[1]),
    "evaluation": evaluation,
    "muon": muon,
    "resume": resume,
    "noise": noise,
    "cache": cache,
    "broken_image": broken_image,
    "one_image": one_image,
    "probes": probes,
    "probe_command": probe_command,
    "probes_one_image": lambda *where: probes(*where, count=1),
    "sharded": sharded,
}


def run_in_two(folder, port):
    """Runs this script twice, as a launcher does, and returns what the cases returned in each process."""
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(outputs))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, own_rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.save({name: case(root / name, 2) for name, case in CASES.items()}, root / f"{own_rank}.pt")
    torch.distributed.destroy_process_group()
