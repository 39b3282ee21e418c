"""Compare distillation recipes on one teacher: the same images in the same order, one trial after the other.

A trial is an entry of a YAML file: what differs from the file's `base`. Every run leaves one JSON file, a finished one
is not repeated, and the table of all of them is printed at the end. Measured on held-out images: R2 and cosine per
layer and token group, accuracy of a linear probe and of k nearest neighbours on `[cls, mean patch]`, seconds per step
(without augmentation the teacher's states are computed once and kept, so that they are no part of it) and the FLOPs of
the student's matrix products.

    python benchmarks/recipe.py TEACHER --dataset PHOTOS --image-size 98 --steps 160 --trials benchmarks/recipe.yaml
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import yaml
from matplotlib.figure import Figure
from sklearn.neighbors import KNeighborsClassifier
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode
from transformers import TrainerCallback, set_seed

from raptor_hf import DistillationArguments, RaptorDistillationTrainer, RaptorModel, Teacher
from raptor_hf.arguments import MODEL_PRESETS
from raptor_hf.data import PixelDataset, load_images
from raptor_hf.distillation import RaptorForDistillation
from raptor_hf.phases import find_phases
from raptor_hf.probes import LinearProbe, ProbeArguments
from raptor_hf.similarity import layer_similarity

COLOURS = {"recommended": "#0072b2", "research": "#d55e00", "paper": "#009e73"}
FIELDS = ("preset", "training", "student", "phases", "num_blocks", "ema", "augment", "growing_horizon")
PROBE = {"learning_rate": 1e-2, "num_epochs": 100, "batch_size": 128, "augment": "none"}


class MemoisedTeacher(Teacher):
    """A teacher that remembers its states of every image, float32, so that a trial does not pay for them again."""

    def hidden_states(self, pixel_values: torch.Tensor) -> Any:
        """States `a_0 .. a_L` of `pixel_values` `(batch_size, channels, height, width)`."""
        memory = self.__dict__.setdefault("memory", {})
        keys = [hash(image.numpy().tobytes()) for image in pixel_values]
        new = [number for number, key in enumerate(keys) if key not in memory]
        if new:
            with torch.autocast(pixel_values.device.type, enabled=False):  # what is measured against has full precision
                states = torch.stack(tuple(super().hidden_states(pixel_values[new])), dim=1)
            memory.update({keys[number]: of_image for number, of_image in zip(new, states, strict=True)})
        return torch.stack([memory[key] for key in keys], dim=1).unbind()


class Ema(TrainerCallback):
    """Exponential moving average of the student's weights, which it ends with."""

    def __init__(self, decay: float) -> None:
        self.decay, self.average = decay, None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Averages; the average begins with the weights of the first step."""
        if self.average is None:
            self.average = AveragedModel(model.raptor.blocks, multi_avg_fn=get_ema_multi_avg_fn(self.decay))
        self.average.update_parameters(model.raptor.blocks)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Hands the average to the student and forgets it, since the next stage has its own."""
        model.raptor.blocks.load_state_dict(self.average.module.state_dict())
        self.average = None


class GrowingHorizon(TrainerCallback):
    """Layers that a path runs on its own states: 1 at first, all of them after `share` of the stage."""

    def __init__(self, share: float) -> None:
        self.share = share

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Sets the horizon of the step."""
        layers, done = model.config.num_hidden_layers, state.global_step / (self.share * state.max_steps)
        horizon = None if done >= 1 else 1 + int(done * (layers - 1))
        model.objective = dataclasses.replace(model.objective, horizon=horizon)


class Bench:
    """One teacher and its images: what all trials share."""

    def __init__(self, args: argparse.Namespace) -> None:
        teacher = Teacher.from_pretrained(args.teacher)
        self.args, self.teacher = args, MemoisedTeacher(teacher.model, teacher.image_processor)
        names = {"train": args.train_split, "test": args.eval_split}
        self.images = {split: load_images(args.dataset, split=name) for split, name in names.items()}
        self.items = {split: list(self.pixels(split)) for split in self.images}
        self.similarity = layer_similarity(self.teacher.iter_hidden_states(self.items["train"], 32))
        self.probe = None
        if args.probe:
            self.probe = LinearProbe(
                self.images["train"], self.images["test"], ProbeArguments(**PROBE), image_size=args.image_size
            )

    def pixels(self, split: str, augment: bool = False) -> PixelDataset:
        """A split at the size asked for."""
        return PixelDataset(
            self.images[split], self.teacher.image_processor, image_size=self.args.image_size,
            augment="crop_flip" if augment else "none", scale=(0.35, 1.0),
        )  # fmt: skip

    def accuracies(self, backbone: RaptorModel | Teacher) -> dict[str, Any]:
        """Top-1 of 20 nearest neighbours by cosine, and of the linear probe with its values by seed."""
        features = {split: self._features(backbone, items) for split, items in self.items.items()}
        labels = {split: [int(item["label"]) for item in items] for split, items in self.items.items()}
        neighbours = KNeighborsClassifier(20, metric="cosine", weights="distance")
        neighbours.fit(features["train"], labels["train"])
        scores: dict[str, Any] = {"knn": float(neighbours.score(features["test"], labels["test"]))}
        if self.probe is not None:
            scores["probe"] = self.probe(backbone, self.teacher.image_processor).values
        return scores

    @torch.no_grad()
    def _features(self, backbone: RaptorModel | Teacher, items: list[dict[str, Any]]) -> Any:
        pooled = []
        for start in range(0, len(items), 64):
            pixels = torch.stack([item["pixel_values"] for item in items[start : start + 64]])
            if isinstance(backbone, Teacher):
                last = backbone.final_norm(backbone.hidden_states(pixels)[-1])
            else:
                last = backbone(pixels).last_hidden_state
            pooled.append(self.teacher.layout.pool(last))
        return torch.cat(pooled).numpy()

    def random_vit(self) -> RaptorModel:
        """A ViT of the teacher's shape, one random block per layer."""
        set_seed(0)
        return RaptorModel.from_teacher(
            self.teacher, (1,) * self.teacher.num_layers, init="random", depth_scale=False, layerscale_value=1.0
        ).eval()


def run_trial(bench: Bench, name: str, trial: dict[str, Any], seed: int) -> dict[str, Any]:
    """Distils and measures one trial."""
    args = bench.args
    preset = trial.get("preset", "recommended")
    set_seed(seed)
    phases = trial.get("phases") or find_phases(bench.similarity, trial.get("num_blocks", args.num_blocks))
    student = {**MODEL_PRESETS[preset], **trial.get("student", {})}
    model = RaptorModel.from_teacher(bench.teacher, phases, **student)
    callbacks: list[TrainerCallback] = []
    if "ema" in trial:
        callbacks.append(Ema(trial["ema"]))
    if "growing_horizon" in trial:
        callbacks.append(GrowingHorizon(trial["growing_horizon"]))
    train = bench.pixels("train", augment=True) if trial.get("augment") else bench.items["train"]
    with tempfile.TemporaryDirectory() as folder:
        training = DistillationArguments(
            output_dir=folder, preset=preset, max_steps=args.steps, per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=64, seed=seed, save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=args.cpu, bf16=args.bf16, dataloader_pin_memory=False, **trial.get("training", {}),
        )  # fmt: skip
        trainer = RaptorDistillationTrainer(
            model, bench.teacher, training, train, bench.items["test"], callbacks=callbacks
        )
        start = time.perf_counter()
        trainer.train()
        seconds = (time.perf_counter() - start) / args.steps
        trainer.evaluate()
    if trainer.fidelity is None:
        raise RuntimeError("the evaluation measured no fidelity")
    return {
        "name": name, "trial": trial, "seed": seed, "steps": args.steps, "batch_size": args.batch_size,
        "image_size": args.image_size, "num_blocks": model.config.num_blocks,
        "block_schedule": list(model.config.block_schedule or ()), "num_parameters": model.num_parameters(),
        "teacher_parameters": bench.teacher.model.num_parameters(), "seconds_per_step": seconds,
        "student_flops": student_flops(bench, model, training), "fidelity": trainer.fidelity.to_dict(),
        "curve": [[entry["step"], entry["loss"]] for entry in trainer.history if "loss" in entry],
        **bench.accuracies(model.eval()),
    }  # fmt: skip


def student_flops(bench: Bench, model: RaptorModel, training: DistillationArguments) -> float:
    """FLOPs of the student's matrix products over the whole run, forward and backward, counted on one image."""
    item = bench.items["train"][0]["pixel_values"][None]
    states = bench.teacher.hidden_states(item)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")  # whose products the counter sees on every device
    total, shares = 0.0, {"blocks": training.blocks_share or 0.0, "end_to_end": 1.0 - (training.blocks_share or 0.0)}
    for stage, share in shares.items():
        steps = round(training.max_steps * share)
        wrapper = RaptorForDistillation(model.config, model, training.objective_for(stage)).train()
        weights = (training.teacher_forcing_weight(stage, step, steps) for step in range(steps))
        # The cost of a step depends on which of the two parts it computes, not on how they are mixed.
        for weight, count in Counter(weight if weight in (0, 1) else 0.5 for weight in weights).items():
            with FlopCounterMode(display=False) as counter:
                wrapper(states, teacher_forcing_weight=weight).loss.backward()
            total += count * counter.get_total_flops() * training.per_device_train_batch_size
    model.zero_grad()
    model.set_attn_implementation(implementation)
    return total


def rows(records: list[dict[str, Any]], first: float) -> list[list[str]]:
    """Table of the records by trial, in the order of their first appearance; mean (sigma) where there are seeds, FLOPs
    as a multiple of `first`.
    """
    grouped: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        grouped.setdefault(record["name"], []).append(record)
    table = []
    for name, runs in grouped.items():
        r2 = [run["fidelity"]["r2"] for run in runs]
        columns = [
            [statistics.fmean(values["all"]) for values in r2],
            [values["all"][-1] for values in r2],
            [values["cls"][-1] for values in r2],
            [values["patch"][-1] for values in r2],
            [statistics.fmean(run["fidelity"]["cosine"]["all"]) for run in runs],
            [run["knn"] for run in runs],
            [value for run in runs for value in run.get("probe", [])],
        ]
        seconds = statistics.median(run["seconds_per_step"] for run in runs)
        cost = [f"{seconds:.2f}", f"{runs[0]['student_flops'] / first:.2f}"]
        table.append([name, str(len(runs)), *(_mean(values) for values in columns), *cost])
    return table


HEADER = ("trial", "runs", "R2 mean", "R2 last", "cls last", "patch last", "cosine", "kNN", "probe", "s/step", "FLOPs")


def _mean(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.fmean(values):.3f}" + (f" ({statistics.stdev(values):.3f})" if len(values) > 1 else "")


def markdown(table: list[list[str]]) -> str:
    """The table as Markdown, columns aligned."""
    widths = [max(len(row[column]) for row in (HEADER, *table)) for column in range(len(HEADER))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (HEADER, *table)]
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def collect(folder: Path) -> dict[str, Any]:
    """All runs of a folder, and its reference accuracies, as they stand in `examples/recipe/results.json`."""
    runs = []
    for path in sorted(folder.glob("*-seed*.json")):
        record = json.loads(path.read_text())
        r2, probe = record["fidelity"]["r2"], record.get("probe", [])
        runs.append(
            {key: record[key] for key in ("name", "image_size", "steps", "seed", "num_blocks", "student_flops", "knn")}
            | {"parameters": record["num_parameters"] / record["teacher_parameters"], "r2": r2["all"], "probe": probe}
        )
    references = {path.stem.split("-")[1]: json.loads(path.read_text()) for path in folder.glob("references-*.json")}
    return {
        "runs": sorted(runs, key=lambda run: (run["name"], run["image_size"], run["steps"])),
        "references": references,
    }


def summary_rows(results: dict[str, Any], image_size: int, steps: int) -> list[list[str]]:
    """Teacher, trials by number of blocks, and the random ViT: the README's table of one image size and length."""
    references = results["references"][f"{image_size}px"]

    def accuracies(scores: dict[str, Any]) -> list[str]:
        return [f"{scores['knn']:.3f}", _mean(scores.get("probe", []))]

    rows = [["teacher", "12", "100 %", "1", "1", *accuracies(references["teacher"])]]
    for run in sorted(results["runs"], key=lambda run: (run["name"] == "paper", run["num_blocks"], run["seed"])):
        if (run["image_size"], run["steps"]) == (image_size, steps):
            r2 = [f"{statistics.fmean(run['r2']):.3f}", f"{run['r2'][-1]:.3f}"]
            name, share = f"Raptor, `{run['name'].split('-')[0]}`", f"{100 * run['parameters']:.0f} %"
            rows.append([name, str(run["num_blocks"]), share, *r2, *accuracies(run)])
    return [*rows, ["random ViT", "12", "100 %", "-", "-", *accuracies(references["random"])]]


def fidelity_figure(runs: list[dict[str, Any]], image_size: int) -> Figure:
    """Mean R2 and that of the last layer against the number of steps, one line per trial that was run at several."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    names = {run["name"] for run in runs if run["image_size"] == image_size}
    for axis, title in zip(axes, ("mean over the layers", "last layer"), strict=True):
        for name in sorted(names, key=lambda name: (name not in COLOURS, name)):
            points: dict[int, list[float]] = {}
            for run in runs:
                if run["name"] == name and run["image_size"] == image_size:
                    value = run["r2"][-1] if title == "last layer" else statistics.fmean(run["r2"])
                    points.setdefault(run["steps"], []).append(value)
            if len(points) > 1:
                steps = sorted(points)
                values = [statistics.fmean(points[step]) for step in steps]
                axis.plot(steps, values, marker="o", label=name, color=COLOURS.get(name))
        axis.set(title=f"R², {title}", xlabel="optimiser steps of the run", xscale="log", ylim=(-1, 1))
        axis.set_xticks(sorted({run["steps"] for run in runs}), sorted({run["steps"] for run in runs}), minor=False)
        axis.minorticks_off()
        axis.axhline(0, color="#999", linewidth=0.8)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("R² on held-out images")
    if axes[1].get_lines()[:-1]:  # beside the line at 0
        axes[1].legend()
    return figure


def read_trials(path: Path, only: list[str] | None) -> dict[str, dict[str, Any]]:
    """Trials of a YAML file, `base` merged into each.

    Raises:
        ValueError: if a trial is unknown or has an unknown field.
    """
    entries = yaml.safe_load(path.read_text())
    base = entries.get("base", {})
    unknown = {name for name in only or [] if name not in entries}
    if unknown:
        raise ValueError(f"{path} has no trial {', '.join(sorted(unknown))}; choose from {', '.join(entries)}.")
    trials = {}
    for name, own in entries.items():
        own = own or {}
        if set(own) - set(FIELDS):
            unknown = set(own) - set(FIELDS)
            raise ValueError(f"trial {name!r} has unknown fields {sorted(unknown)}; use {', '.join(FIELDS)}.")
        merged = {} if "preset" in own else dict(base)
        merged.update(own)
        for part in ("training", "student"):
            inherited = {} if "preset" in own else base.get(part, {})
            merged[part] = {**inherited, **own.get(part, {})}
        if only is None or name in only:
            trials[name] = merged
    return trials


def summarise(args: argparse.Namespace) -> int:
    """Writes what lies in the output folder as `results.json` and `fidelity.png`."""
    results = collect(args.output_dir)
    args.summary.mkdir(parents=True, exist_ok=True)
    (args.summary / "results.json").write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    fidelity_figure(results["runs"], args.image_size).savefig(args.summary / "fidelity.png", dpi=150)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, print the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="Hub id or folder of the teacher")
    parser.add_argument("--dataset", default="digits", help="digits, a Hub id, or an ImageFolder")
    parser.add_argument("--train-split", default="train", help="split that is trained on")
    parser.add_argument("--eval-split", default="test", help="split that is measured on")
    parser.add_argument("--image-size", type=int, default=98, help="pixels of a side")
    parser.add_argument("--steps", type=int, default=160, help="steps of both stages together")
    parser.add_argument("--batch-size", type=int, default=12, help="images per step")
    parser.add_argument("--num-blocks", type=int, default=3, help="blocks, where a trial does not say")
    parser.add_argument("--trials", type=Path, default=Path(__file__).with_suffix(".yaml"), help="YAML file of trials")
    parser.add_argument("--only", nargs="+", default=None, help="trials to run, all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of every trial")
    parser.add_argument("--probe", action="store_true", help="also train linear probes")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/recipe"), help="folder of the results")
    parser.add_argument("--summary", type=Path, default=None, help="folder of a table and a figure of all runs there")
    args = parser.parse_args(argv)
    if args.summary is not None:
        return summarise(args)
    trials = read_trials(args.trials, args.only)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    bench, records = Bench(args), []
    for name, trial in trials.items():
        for seed in args.seeds:
            path = args.output_dir / f"{name}-{args.image_size}px-{args.steps}-seed{seed}.json"
            if not path.is_file():
                record = run_trial(bench, name, trial, seed)
                path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
            records.append(json.loads(path.read_text()))
            print(markdown(rows(records[-1:], records[0]["student_flops"])).splitlines()[-1], flush=True)
    references = {"teacher": bench.accuracies(bench.teacher), "random": bench.accuracies(bench.random_vit())}
    (args.output_dir / f"references-{args.image_size}px.json").write_text(json.dumps(references, indent=1) + "\n")
    print(f"\n{markdown(rows(records, records[0]['student_flops']))}\n")
    for name, scores in references.items():
        print(f"{name}: kNN {scores['knn']:.3f}, probe {_mean(scores.get('probe', []))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
