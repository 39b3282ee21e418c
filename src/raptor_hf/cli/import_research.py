"""`raptor-hf import-research FILE --teacher NAME`: a checkpoint of the paper's code becomes a folder for the Hub."""

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..cards import write_card
from ..modeling_raptor import RaptorModel
from ..research_import import PUBLISHED_LAST_LAYERS, load_research_blocks, research_config, research_state
from ..vision_models import public_name
from .common import TeacherArguments, load_teacher
from .console import note, warn
from .parsing import parse
from .values import UsageError

# Of the teacher, not of the blocks: what the checkpoint does not hold.
_FROM_TEACHER = ("image_size", "patch_size", "num_channels", "num_register_tokens", "interpolate_antialias")


@dataclass
class ImportArguments:
    """The checkpoint."""

    _argument_group_name = "Import"

    file: str | None = field(default=None, metadata={"help": "State dict, .safetensors or of torch.save (required)."})
    output_dir: str | None = field(default=None, metadata={"help": "Folder that is made (required)."})
    last_layers: list[int] | None = field(
        default=None, metadata={"help": "Last layer of each block but the final one, as 7,10; known for k = 2, 3, 4."}
    )
    allow_pickle: bool = field(
        default=False, metadata={"help": "Whether a whole pickled module may be loaded, which can run any code."}
    )


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    args, source = parse(
        "import-research", [ImportArguments, TeacherArguments], argv, ["file", "output_dir"], description=__doc__
    )
    if args.file is None or args.output_dir is None:
        raise UsageError("give a checkpoint and a folder: raptor-hf import-research FILE OUT --teacher NAME.")
    state = research_state(_load(Path(args.file), args.allow_pickle))
    teacher = load_teacher(source)
    fields = teacher.config_fields()
    last_layers = args.last_layers
    if last_layers is None:
        blocks = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
        last_layers = PUBLISHED_LAST_LAYERS.get((blocks, fields["num_hidden_layers"]))
        if last_layers is None:
            raise UsageError(
                f"no published split of {fields['num_hidden_layers']} layers into {blocks} blocks; give --last-layers."
            )
    config = research_config(
        state, last_layers, fields["num_hidden_layers"], fields["num_attention_heads"],
        teacher_name_or_path=public_name(teacher.name_or_path), teacher_revision=source.revision,
        **{name: fields[name] for name in _FROM_TEACHER},
    )  # fmt: skip
    if config.hidden_size != fields["hidden_size"]:
        raise UsageError(
            f"the checkpoint has {config.hidden_size} features, the teacher {fields['hidden_size']}; name its teacher."
        )
    model = RaptorModel(config)
    model.load_state_dict(teacher.embedding_state(), strict=False)
    load_research_blocks(model, state)
    model.save_pretrained(args.output_dir)
    if teacher.image_processor is not None:
        teacher.image_processor.save_pretrained(args.output_dir)
    write_card(args.output_dir)
    note(f"wrote {args.output_dir}: {config.num_blocks} blocks, {config.mlp_type}, last layers {list(last_layers)}")
    return 0


def _load(path: Path, allow_pickle: bool) -> Any:
    """What the file holds: a mapping, or a module where pickles are allowed."""
    if not path.is_file():
        raise UsageError(f"{path} is no file.")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise UsageError(f"{path} is damaged: {error}") from error
    if allow_pickle:
        warn(f"{path} is unpickled, which can run any code; do this only with files that you trust")
    try:
        return torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds more than tensors, as a pickled module does; if you trust it, give --allow-pickle."
        ) from error
    except (AttributeError, ImportError) as error:
        raise UsageError(f"{path} needs the code it was saved with ({error}); run where that is importable.") from error
