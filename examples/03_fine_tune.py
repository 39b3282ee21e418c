"""Fine-tune a Raptor on a folder of images, one sub-folder per class: all weights, the head alone, or LoRA.

    accelerate launch --config_file examples/accelerate/one_process.yaml examples/03_fine_tune.py \
        --model runs/k3/model --dataset photos --method lora --output_dir runs/tuned

`full` trains all but the embeddings, `linear` the head alone, `lora` the head and low-rank changes of the tied blocks,
one of them per block, which acts at every application. The model that is saved in `OUTPUT_DIR/model` is a plain
`RaptorForImageClassification`; LoRA's own weights are also saved apart, in `OUTPUT_DIR/adapter`.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoImageProcessor, HfArgumentParser, PreTrainedModel, Trainer, TrainingArguments, set_seed

from raptor_hf import RaptorForImageClassification
from raptor_hf.data import PixelDataset, collate_pixels, load_images
from raptor_hf.metrics import RaptorAccuracy

METHODS = ("full", "linear", "lora")
LORA_TARGETS = ["qkv", "proj", "fc1", "fc2"]


@dataclass
class FineTuneArguments:
    """What is fine-tuned, and how."""

    model: str = field(metadata={"help": "Folder or Hub id of a Raptor."})
    dataset: str = field(default="digits", metadata={"help": "Folder of images, Hub dataset id, or digits."})
    method: str = field(default="lora", metadata={"help": "full, linear or lora."})
    rank: int = field(default=8, metadata={"help": "Rank of LoRA."})
    max_images: int | None = field(default=None, metadata={"help": "Random subset of every split."})


def make_model(args: FineTuneArguments, label_names: list[str]) -> Any:
    """The classifier with the weights frozen that `args.method` does not train."""
    labels = dict(enumerate(label_names))
    model = RaptorForImageClassification.from_pretrained(
        args.model, num_labels=len(labels), id2label=labels, label2id={name: number for number, name in labels.items()},
        ignore_mismatched_sizes=True,  # a classifier of other classes gets a new head
    )  # fmt: skip
    if args.method == "linear":
        model.raptor.requires_grad_(False)
    model.raptor.freeze_embeddings()
    if args.method != "lora":
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError('LoRA needs PEFT; install it with: pip install "raptor_hf[peft]"') from error
    lora = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules=LORA_TARGETS, modules_to_save=["classifier"]
    )
    return get_peft_model(model, lora)


def accuracy(prediction: Any) -> dict[str, float]:
    """Top-1 for the Trainer."""
    classes = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": RaptorAccuracy().compute(predictions=classes, references=prediction.label_ids)["accuracy"]}


def fine_tune(args: FineTuneArguments, training: TrainingArguments) -> tuple[PreTrainedModel, dict[str, float]]:
    """Trains, measures and saves; returns the plain classifier and the metrics of the test split."""
    if args.method not in METHODS:
        raise ValueError(f"method={args.method!r} is unknown; use one of {', '.join(METHODS)}.")
    set_seed(training.seed)
    processor = AutoImageProcessor.from_pretrained(args.model)
    images = {split: load_images(args.dataset, split=split, max_images=args.max_images) for split in ("train", "test")}
    if images["train"].label_names is None:
        raise ValueError(f"{args.dataset} has no classes; make one sub-folder per class in its splits.")
    train, test = (PixelDataset(images[split], processor) for split in ("train", "test"))
    model = make_model(args, images["train"].label_names)
    training.remove_unused_columns, training.label_names = False, ["labels"]  # PEFT's wrapper hides the signature
    trainer = Trainer(
        model, training, data_collator=collate_pixels, train_dataset=train, eval_dataset=test, compute_metrics=accuracy
    )
    trainer.train()
    metrics = trainer.evaluate()
    output_dir = Path(training.output_dir)
    if args.method == "lora":
        model.save_pretrained(output_dir / "adapter")
        model = model.merge_and_unload()
    if trainer.is_world_process_zero():
        model.save_pretrained(output_dir / "model")
        processor.save_pretrained(output_dir / "model")
    return model, metrics


def main(argv: list[str] | None = None) -> int:
    """Runs the script."""
    args, training = HfArgumentParser((FineTuneArguments, TrainingArguments)).parse_args_into_dataclasses(argv)
    _, metrics = fine_tune(args, training)
    sys.stdout.write(f"{args.method}: top-1 {metrics['eval_accuracy']:.4f}, saved in {training.output_dir}/model\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
