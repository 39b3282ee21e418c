"""One distillation as a folder: phases, training, evaluation and the record of it that reports read.

The quickstart and the commands share these steps, so that what the one shows is what the others do.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import set_seed

from .activations import ActivationCache
from .arguments import MODEL_PRESETS, DistillationArguments
from .data import PixelDataset
from .modeling_raptor import RaptorModel
from .phases import Phases, find_phases
from .results import model_record, read_json, write_json
from .similarity import layer_similarities
from .teachers import Teacher
from .trainer import RaptorDistillationTrainer
from .vision_models import VisionModel

PHASES_FILE = "phases.json"
MODEL_FOLDER = "model"


def discover_phases(
    model: VisionModel,
    pixels: PixelDataset,
    num_blocks: tuple[int, ...],
    path: Path,
    *,
    tokens: str = "all",
    batch_size: int = 32,
    **options: Any,
) -> dict[str, Any]:
    """Similarity of a ViT's layers over `pixels` and its partitions, kept in `path`, or taken from there.

    Args:
        model, pixels: whose states, and on what.
        num_blocks: the numbers of blocks to find phases for.
        path: the JSON file.
        tokens: tokens that are compared, see [`~raptor_hf.layer_similarity`].
        batch_size: images in a forward pass.
        options: further arguments of [`~raptor_hf.find_phases`].

    Returns:
        `{"tokens", "num_images", "similarity", "groups", "partitions"}`: the similarity of `tokens`; that of all tokens
        and of each token group that the model has; a partition for each of `num_blocks`, under its decimal number.

    Raises:
        ValueError: as the two functions do.
    """
    asked = {str(count) for count in num_blocks}
    of = {"tokens": tokens, "num_images": len(pixels)}
    if path.is_file():
        record = read_json(path)
        if asked <= set(record["partitions"]) and "groups" in record and of == {name: record[name] for name in of}:
            return record
    images = (pixels[index] for index in range(len(pixels)))
    groups = dict.fromkeys(("all", *model.layout.groups, tokens))
    found = layer_similarities(model.iter_hidden_states(images, batch_size), list(groups))
    similarity = found[tokens]
    record = {
        **of,
        "similarity": similarity.tolist(),
        "groups": {name: found[name].tolist() for name in ("all", *model.layout.groups)},
        "partitions": {str(count): find_phases(similarity, count, **options).to_dict() for count in num_blocks},
    }
    write_json(path, record)
    return record


def distill(
    teacher: Teacher,
    phases: Phases,
    args: DistillationArguments,
    train: PixelDataset,
    evaluation: PixelDataset | None,
    *,
    name: str,
    student: Mapping[str, Any] | None = None,
    start: RaptorModel | None = None,
    blocks: Sequence[int] | None = None,
    cache: ActivationCache | None = None,
) -> tuple[RaptorModel, dict[str, Any]]:
    """Distils one Raptor into `args.output_dir`, going on with what an interrupted run left there.

    Args:
        teacher, phases, args: as for [`~raptor_hf.RaptorDistillationTrainer`].
        train, evaluation: processed images; fidelity is measured on the second, if there is one.
        name: of the Raptor in reports.
        student: arguments of [`RaptorModel.from_teacher`] beside those of the preset.
        start: a Raptor to go on from, instead of one made from the teacher.
        blocks: blocks that learn in stage 1; all by default.
        cache: the teacher's states of `train`, which are then read instead of computed.

    Returns:
        the student, saved in `output_dir/model` with its image processor, and its record.

    Raises:
        ValueError: as the trainer does.
    """
    begin = time.monotonic()
    set_seed(args.seed)
    chosen = {key: value for key, value in (student or {}).items() if value is not None}
    chosen = {**MODEL_PRESETS[args.preset], **chosen}
    model = RaptorModel.from_teacher(teacher, phases, **chosen) if start is None else start
    processor = train.processor or teacher.image_processor
    trainer = RaptorDistillationTrainer(
        model, teacher, args, train if cache is None else cache, evaluation, processing_class=processor, blocks=blocks
    )
    result = trainer.train(resume_from_checkpoint=True)
    if evaluation is not None:
        trainer.evaluate()
    trainer.save_model(str(Path(str(args.output_dir)) / MODEL_FOLDER))
    record = model_record(
        model, args, name=name, path=MODEL_FOLDER, steps=result.global_step, history=trainer.history,
        student=chosen, fidelity=trainer.fidelity, seconds=time.monotonic() - begin, blocks=blocks,
    )  # fmt: skip
    return model, record
