"""Results of a made-up run, with everything that `results.json` can hold."""

import numpy as np
import torch

NAN = float("nan")


def raptor(name, schedule, last, **fields):
    curve = np.linspace(1.0, last, 4)
    return {
        "name": name, "path": f"{name}/model", "num_blocks": max(schedule) + 1, "block_schedule": schedule,
        "num_parameters": 500_000 * (max(schedule) + 1), "seeds": (0, 1),
        "fidelity": {
            "r2": {"all": curve, "cls": curve - 0.1, "patch": [NAN] * 4}, "cosine": {"all": torch.tensor(curve)},
            "num_images": 1797, "definition": "variance_weighted",
        },
        "training": {
            "preset": "recommended", "steps": np.int64(40), "seconds": 12.5, "student": {"init": "middle"},
            "history": [{"step": step, "loss": 1.0 / step} for step in range(10, 50, 10)],
        },
        **fields,
    }  # fmt: skip


def make_results():
    return {
        "format": 1,
        "title": "Digits & <friends>",
        "command": "raptor-hf quickstart --output-dir /home/somebody/runs/digits --seed 7",
        "seed": 7,
        "environment": {"python": "3.11.9", "accelerator": None},
        "teacher": {
            "name": "/home/somebody/teachers/digits-vit", "model_type": "vit", "num_layers": 4, "hidden_size": 32,
            "num_parameters": 2_000_000,
        },
        "dataset": {"name": "digits", "num_train": 1437, "num_test": 360, "num_skipped": 3},
        "phases": {
            "tokens": "cls", "num_images": 1437, "similarity": np.eye(4),
            "partitions": {
                "2": {"block_schedule": [0, 0, 1, 1], "repeats": [2, 2], "score": 3.25, "method": "dp"},
                "3": {"block_schedule": [0, 1, 0, 2], "repeats": [2, 1, 1], "score": NAN, "method": "given"},
            },
        },
        "models": [raptor("raptor-k2", [0, 0, 1, 1], 0.8), raptor("<b>&", [0, 1, 0, 1], 0.6)],
        "probe": {
            "task": "image-classification", "protocol": {"epochs": 20, "augment": False},
            "results": {
                "teacher": {"accuracy": [0.9, 0.92], "mean": 0.91, "std": 0.0125},
                "raptor-k2": {"accuracy": [0.88, 0.9], "mean": 0.89, "std": 0.0137, "retained": 0.978},
                "ViT-S": {"accuracy": [0.5], "mean": 0.5, "std": None},
            },
        },
        "timings": {"teacher": 41.25},
    }  # fmt: skip
