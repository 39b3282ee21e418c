"""A Raptor for other runtimes: ONNX or `torch.export`, free in batch and image size, compared with the model itself.

The layers are unrolled in the graph, but every weight-tied matrix is stored once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from .modeling_raptor import RaptorBackbone, RaptorForDepthEstimation, RaptorModel, RaptorPreTrainedModel

FORMATS = ("safetensors", "onnx", "torch-export")
TOLERANCE = 1e-4
_FILES = {"onnx": "model.onnx", "torch-export": "model.pt2"}
_NEEDS = 'exporting to ONNX needs more packages; install them with: pip install "raptor_hf[export]"'


class _Graph(nn.Module):
    """Images in, a tuple of tensors out: what a graph can be made of."""

    def __init__(self, model: RaptorPreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs that [`output_names`] lists."""
        outputs = self.model(pixel_values)
        return tuple(outputs[name] for name in output_names(self.model))


def output_names(model: RaptorPreTrainedModel) -> tuple[str, ...]:
    """Outputs of an exported model: `logits` or `predicted_depth` of a head, else `last_hidden_state` and
    `pooler_output`.
    """
    if isinstance(model, RaptorForDepthEstimation):
        return ("predicted_depth",)
    return ("last_hidden_state", "pooler_output") if isinstance(model, RaptorModel) else ("logits",)


def export_model(
    model: RaptorPreTrainedModel,
    output_dir: str | Path,
    format: str = "onnx",
    *,
    pixel_values: torch.Tensor | None = None,
    tolerance: float = TOLERANCE,
) -> tuple[Path, float]:
    """Writes a Raptor in another format and compares what the file gives with the model.

    Args:
        model: a [`RaptorModel`] or one of the heads on it; a `float32` copy on the CPU is exported.
        output_dir: folder of `model.onnx` or `model.pt2`; of the whole model for `"safetensors"`.
        format: `"safetensors"`, `"onnx"` or `"torch-export"`.
        pixel_values: processed images `(batch_size, channels, height, width)` to compare on, beside noise of two other
            sizes and batch sizes.
        tolerance: largest difference, as a share of the largest value if that is above 1.

    Returns:
        the path, and the largest difference found.

    Raises:
        ValueError: if the format is unknown or the model has no graph of its own.
        ImportError: if the packages of the extra `export` are missing.
        RuntimeError: if the file's outputs differ by more than the tolerance.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; use one of {', '.join(FORMATS)}.")
    if isinstance(model, RaptorBackbone):
        raise ValueError("RaptorBackbone cannot be exported; use RaptorModel or a head such as its classifier.")
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    graph = _Graph(type(model)(model.config)).eval()
    graph.model.load_state_dict(model.state_dict())
    graph.requires_grad_(False)
    run: Callable[..., Any]
    if format == "safetensors":
        model.save_pretrained(output_dir)
        path, run = output_dir, _Graph(type(model).from_pretrained(output_dir, dtype=torch.float32)).eval()
    else:
        program, path = _program(graph), output_dir / _FILES[format]
        run = _write_onnx(program, graph.model, path) if format == "onnx" else _write_program(program, path)
    difference = _largest_difference(run, graph, _batches(graph.model, pixel_values))
    if difference > tolerance:
        raise RuntimeError(f"{path} gives outputs that differ by {difference:.1e} from the model's, above {tolerance}.")
    return path, difference


def _program(graph: _Graph) -> ExportedProgram:
    config = graph.model.config
    batch, rows, columns = Dim("batch"), Dim("rows"), Dim("columns")
    sizes = {0: batch, 2: config.patch_size * rows, 3: config.patch_size * columns}
    example = torch.zeros(2, config.num_channels, 3 * config.patch_size, 5 * config.patch_size)
    with torch.no_grad():
        return torch.export.export(graph, (example,), dynamic_shapes={"pixel_values": sizes})


def _write_program(program: ExportedProgram, path: Path) -> Callable[..., Any]:
    torch.export.save(program, path)
    return torch.export.load(path).module()


def _write_onnx(program: ExportedProgram, model: RaptorPreTrainedModel, path: Path) -> Callable[..., Any]:
    try:
        import onnxruntime
        from onnx_ir.passes.common import DeduplicateInitializersPass

        onnx = torch.onnx.export(
            program, dynamo=True, input_names=["pixel_values"], output_names=list(output_names(model)), verbose=False
        )
    except ImportError as error:
        raise ImportError(_NEEDS) from error
    if onnx is None:
        raise RuntimeError("torch.onnx.export returned no program")
    DeduplicateInitializersPass(size_limit=2**40)(onnx.model)  # until here each application has its own copy
    onnx.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(pixel_values: torch.Tensor) -> list[torch.Tensor]:
        """The outputs of the file."""
        return [torch.from_numpy(output) for output in session.run(None, {"pixel_values": pixel_values.numpy()})]

    return run


def _batches(model: RaptorPreTrainedModel, pixel_values: torch.Tensor | None) -> list[torch.Tensor]:
    config, generator = model.config, torch.Generator().manual_seed(0)
    sizes = [(1, config.image_size, config.image_size), (3, 2 * config.patch_size, 4 * config.patch_size)]
    noise = [torch.randn(batch, config.num_channels, *size, generator=generator) for batch, *size in sizes]
    return noise if pixel_values is None else [pixel_values.float().cpu(), *noise]


@torch.no_grad()
def _largest_difference(run: Callable[..., Any], graph: _Graph, batches: Sequence[torch.Tensor]) -> float:
    largest = 0.0
    for batch in batches:
        for own, expected in zip(run(batch), graph(batch), strict=True):
            largest = max(largest, float((own - expected).abs().max() / expected.abs().max().clamp(min=1)))
    return largest
