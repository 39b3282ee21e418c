"""A model as layers that can be applied in any order, and how its final state is compared."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..fidelity import cosine_from_sums, token_sums
from ..modeling_raptor import RaptorModel
from ..teachers import Teacher
from ..tokens import TokenLayout

Model = Teacher | RaptorModel
Batch = torch.Tensor | Mapping[str, torch.Tensor]
Head = Callable[[torch.Tensor], torch.Tensor]


def base_states(model: Model, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """States `0..L` of images `(batch_size, num_channels, height, width)`, `(batch_size, seq_length, hidden_size)`
    each, the last one before the final LayerNorm; the model is put in evaluation mode.
    """
    pixel_values = pixel_values.to(model.device)
    if isinstance(model, Teacher):
        return model.hidden_states(pixel_values)
    with torch.no_grad():
        return model.eval()(pixel_values, output_hidden_states=True, return_dict=True).hidden_states


def run_layers(model: Model, hidden_states: torch.Tensor, layers: Iterable[int]) -> list[torch.Tensor]:
    """Takes a state through any layers in any order.

    Args:
        model (`Teacher` or `RaptorModel`): put in evaluation mode.
        hidden_states (`torch.Tensor` of shape `(batch_size, seq_length, hidden_size)`): the state to start from.
        layers (`Iterable[int]`): the layers to apply, counted from 1. `range(l + 1, L + 1)` on state `l` is the model.

    Returns:
        `list[torch.Tensor]`: the state given and the one after each layer.

    Raises:
        ValueError: if a layer does not exist, or the state has another shape.
    """
    order = [checked_layer(model, layer) for layer in layers]
    width = model.hidden_size if isinstance(model, Teacher) else model.config.hidden_size
    if hidden_states.ndim != 3 or hidden_states.shape[-1] != width:
        raise ValueError(
            f"hidden_states of shape {tuple(hidden_states.shape)}; pass states (batch_size, seq_length, {width})."
        )
    states = [hidden_states]
    with torch.no_grad():
        for layer in order:
            states.append(model.apply_layer(states[-1], layer))
    return states


def num_layers_of(model: Model) -> int:
    """`L`."""
    return model.num_layers if isinstance(model, Teacher) else model.config.num_hidden_layers


def layout_of(model: Model) -> TokenLayout:
    """Where the model's token groups sit."""
    return model.layout if isinstance(model, Teacher) else model.config.token_layout


@torch.no_grad()
def final_norm(model: Model, hidden_states: torch.Tensor) -> torch.Tensor:
    """The model's final LayerNorm on states `(batch_size, seq_length, hidden_size)`."""
    return model.final_norm(hidden_states) if isinstance(model, Teacher) else model.layernorm(hidden_states)


@torch.no_grad()
def head_hits(model: Model, final: torch.Tensor, labels: torch.Tensor | None, head: Head | None) -> int:
    """Images whose label has the head's largest logit; 0 without a head."""
    if head is None or labels is None:
        return 0
    logits = head(final_norm(model, final))
    if logits.ndim != 2 or len(logits) != len(labels):
        raise ValueError(
            f"the head gave {tuple(logits.shape)} for {len(labels)} images; it must take the final LayerNorm's output "
            "(batch_size, seq_length, hidden_size) to logits (batch_size, num_labels)."
        )
    return int((logits.argmax(dim=-1) == labels.to(logits.device)).sum())


def checked_layer(model: Model, layer: Any, low: int = 1) -> int:
    """`layer`, if the model has it.

    Raises:
        ValueError: if it is no whole number of `low..L`.
    """
    high = num_layers_of(model)
    if isinstance(layer, bool) or not isinstance(layer, int) or not low <= layer <= high:
        raise ValueError(f"layer={layer!r}: this model has {'layers' if low else 'states'} {low} to {high}; use these.")
    return layer


def unpacked(batches: Iterable[Batch], needs_labels: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Pixel values `(batch_size, num_channels, height, width)` and class numbers `(batch_size,)` of each batch.

    Raises:
        ValueError: if there is no batch, or labels are needed and missing or of another shape.
    """
    is_empty = True
    for batch in batches:
        is_empty = False
        pixel_values, labels = (batch, None) if isinstance(batch, torch.Tensor) else _columns(batch)
        if needs_labels and (labels is None or labels.shape != pixel_values.shape[:1]):
            given = "none" if labels is None else f"shape {tuple(labels.shape)}"
            raise ValueError(
                f"labels ({given}) of {len(pixel_values)} images: a head needs one class number each; pass batches "
                "{'pixel_values': ..., 'labels': ...}."
            )
        yield pixel_values, labels
    if is_empty:
        raise ValueError("no batch of images was given; is the evaluation set empty?")


def first_images(batches: Iterable[Batch], count: int) -> list[torch.Tensor]:
    """Pixel values of the first `count` images, as batches; no batch behind them is read."""
    images: list[torch.Tensor] = []
    for pixel_values, _ in unpacked(batches, needs_labels=False):
        images.append(pixel_values[: count - sum(map(len, images))])
        if sum(map(len, images)) >= count:
            break
    return images


def group_sums(final: torch.Tensor, base: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """Number of tokens and sum of their cosines between two states, per token group: `(num_groups, 2)`, float64, on the
    CPU. Computed in float64, since `1 - cos` of a small perturbation is beyond float32.
    """
    device = torch.device("cpu") if final.device.type == "mps" else final.device  # Apple's GPUs have no float64
    final, base = final.to(device, torch.float64), base.to(device, torch.float64)
    rows = [token_sums(layout.select(final, name), layout.select(base, name))[:2] for name in layout.groups]
    return torch.stack(rows).cpu()


def group_cosines(sums: torch.Tensor, layout: TokenLayout) -> dict[str, float]:
    """Mean cosine of `"all"` tokens and of each group, from what [`group_sums`] returned or a sum of it."""
    named = {"all": sums.sum(dim=0), **dict(zip(layout.groups, sums, strict=True))}
    return {name: cosine_from_sums(row) for name, row in named.items()}


def plain(value: Any) -> Any:
    """Nested dicts and sequences for strict JSON: tuples become lists, numbers that are not finite `None`."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns(batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    if "pixel_values" not in batch:
        raise ValueError(
            f"batch with {sorted(batch)}: 'pixel_values' is missing; pass processed images under that name."
        )
    return batch["pixel_values"], batch.get("labels")
