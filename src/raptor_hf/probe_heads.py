"""A probe's head with its backbone, as a model that is saved, pushed, and used in a pipeline like any other."""

import copy
from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch import nn
from transformers import (
    AutoModelForDepthEstimation,
    AutoModelForImageClassification,
    AutoModelForSemanticSegmentation,
    DPTImageProcessorPil,
    PreTrainedModel,
)

from .data import processor_at_size
from .dense_pixels import Frame
from .dense_probes import DEPTH, SEGMENTATION, DenseProbe, probe_bins
from .modeling_raptor import (
    RaptorForDepthEstimation,
    RaptorForImageClassification,
    RaptorForSemanticSegmentation,
    RaptorModel,
)
from .probes import LinearProbe
from .teachers import Teacher

_HEADS: dict[str, tuple[type[PreTrainedModel], Any, str]] = {
    "image-classification": (RaptorForImageClassification, AutoModelForImageClassification, "classifier"),
    SEGMENTATION.name: (RaptorForSemanticSegmentation, AutoModelForSemanticSegmentation, "decode_head"),
    DEPTH.name: (RaptorForDepthEstimation, AutoModelForDepthEstimation, "head"),
}
# What a backbone was trained on; sizes are the probe's.
_KEPT = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "do_convert_rgb")


def model_with_head(
    backbone: RaptorModel | Teacher, head: nn.Module, processor: Any, probe: LinearProbe | DenseProbe
) -> tuple[PreTrainedModel, Any]:
    """The backbone and a trained head as one model, and the image processor that goes with it.

    A ViT becomes a Raptor of one block per layer, which computes what it computes. Weights are copied.

    Args:
        backbone, processor: what was probed.
        head: of [`~raptor_hf.probes.ProbeResult`].
        probe: what trained it, which knows its task, classes and sizes.

    Returns:
        a `RaptorForImageClassification`, `RaptorForSemanticSegmentation` or `RaptorForDepthEstimation`, and its image
        processor. That of a dense task is a `DPTImageProcessor`, since it must bring predictions to any size. It makes
        images of the probe's size, whose sides it rounds up to whole patches where the probe pads them: 490 x 644
        pixels for the 480 x 640 of NYUv2 and patches of 14.

    Raises:
        ValueError: if the probe's task has no model.
    """
    if probe.task.name not in _HEADS:
        raise ValueError(f"task {probe.task.name!r} has no model; probes of {', '.join(_HEADS)} have one.")
    raptor = backbone
    if isinstance(raptor, Teacher):
        raptor = RaptorModel.from_teacher(raptor, [1] * raptor.num_layers)
    kind, _, name = _HEADS[probe.task.name]
    config = copy.deepcopy(raptor.config)
    if isinstance(probe, LinearProbe):
        names = probe.train_images.label_names or [f"LABEL_{label}" for label in range(probe.num_classes)]
    elif probe.task is SEGMENTATION:
        numbered = [f"LABEL_{label}" for label in range(SEGMENTATION.num_outputs)]
        names = list(probe.eval_pairs.label_names or numbered)
    else:
        bins, names = probe_bins(), []
        config.num_depth_bins, config.min_depth, config.max_depth = bins.number, bins.minimum, bins.maximum
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = {label: number for number, label in enumerate(names)}
    model = kind(config).to(raptor.dtype)
    model.raptor.load_state_dict(raptor.state_dict())
    getattr(model, name).load_state_dict(head.state_dict())
    return model.eval(), _processor(processor, probe, config.patch_size)


def load_head(name: str, task: str, label_names: Sequence[str] | None = None) -> nn.Module:
    """The linear head of a saved model: one of [`model_with_head`], or a public classifier such as
    `facebook/dinov2-with-registers-base-imagenet1k-1-layer`, whose head reads `[cls, mean patch]` too.

    Args:
        name: folder or Hub id.
        task: of the probe.
        label_names: classes in the order of the probe's labels, which must be the head's; of other names (WordNet ids,
            say) the number alone counts.

    Raises:
        OSError: if it cannot be loaded.
        ValueError: if its head is not linear, or has the classes in another order.
    """
    _, auto, attribute = _HEADS[task]
    model, report = auto.from_pretrained(name, output_loading_info=True)
    head = getattr(model, attribute, None)
    if not isinstance(head, (nn.Linear, nn.Conv2d)) or any(key.startswith(attribute) for key in report["missing_keys"]):
        raise ValueError(
            f"{name} has no trained linear head; name a model that has one, such as probe --save_heads leaves."
        )
    own = [model.config.id2label[label] for label in sorted(model.config.id2label)]
    if label_names and own != list(label_names) and sorted(own) == sorted(label_names):
        raise ValueError(f"the head of {name} has the classes of the images in another order; sort them alike.")
    return head


def _processor(processor: Any, probe: LinearProbe | DenseProbe, patch_size: int) -> Any:
    if isinstance(probe, LinearProbe):
        return processor if probe.image_size is None else processor_at_size(processor, probe.image_size)
    height, width = Frame(probe.arguments.image_size, patch_size).padded
    kept = {name: getattr(processor, name) for name in _KEPT if getattr(processor, name, None) is not None}
    return DPTImageProcessorPil(size={"height": height, "width": width}, resample=Image.Resampling.BICUBIC, **kept)
