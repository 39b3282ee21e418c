"""`raptor-hf export DIR`: a saved Raptor as ONNX or torch.export, free in batch and size, compared with itself."""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoImageProcessor

from ..data import PixelDataset, collate_pixels, load_images
from ..export import export_model
from ..modeling_raptor import RaptorForImageClassification, RaptorModel
from .common import require_weights, saved_raptor
from .console import note, status
from .parsing import parse
from .values import UsageError


@dataclass
class ExportArguments:
    """What is exported."""

    _argument_group_name = "Export"

    folder: str | None = field(default=None, metadata={"help": "Folder of a saved Raptor (required)."})
    output_dir: str | None = field(default=None, metadata={"help": "Folder of the file; default that of the model."})
    format: str = field(default="onnx", metadata={"help": "onnx, torch-export or safetensors."})
    dtype: str | None = field(default=None, metadata={"help": "Of the weights, safetensors alone; default as saved."})
    dataset: str = field(default="digits", metadata={"help": "Images that the outputs are compared on."})
    split: str = field(default="test", metadata={"help": "Split of the images."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    (args,) = parse("export", [ExportArguments], argv, ["folder"], description=__doc__)
    config = saved_raptor(args.folder)
    require_weights(args.folder)
    output_dir = Path(args.output_dir or args.folder)
    if args.format == "safetensors" and output_dir.resolve() == Path(args.folder).resolve():
        raise UsageError("safetensors would replace the model itself; give another --output_dir.")
    if args.dtype is not None and args.format != "safetensors":
        raise UsageError(f"--dtype is for safetensors; {args.format} files are float32.")
    is_classifier = (config.architectures or [""])[0] == RaptorForImageClassification.__name__
    model = (RaptorForImageClassification if is_classifier else RaptorModel).from_pretrained(
        args.folder, dtype=args.dtype or "auto"
    )
    processor = AutoImageProcessor.from_pretrained(args.folder)
    pixels = PixelDataset(load_images(args.dataset, split=args.split, max_images=2), processor)
    batch = collate_pixels([pixels[index] for index in range(len(pixels))])["pixel_values"]
    with status(f"exporting {args.folder} as {args.format}"):
        path, difference = export_model(model, output_dir, args.format, pixel_values=batch)
    if output_dir.resolve() != Path(args.folder).resolve():
        processor.save_pretrained(output_dir)
    note(f"wrote {path}; its outputs differ by at most {difference:.1e}")
    return 0
