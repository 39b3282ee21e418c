"""The depth flow of one model, and of two side by side (arXiv 2512.19941, Sec. 4)."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..dynamics import Dynamics, DynamicsEstimator, angle, normalise, principal_components
from ..interventions import Batch, Model, base_states, perturb, sensitivity_curve
from ..interventions.runs import first_images, layout_of, num_layers_of, plain, unpacked
from ..phases import find_phases
from ..similarity import layer_similarity
from ..teachers import Teacher
from ..tokens import schedule_segments


def study_dynamics(
    model: Model,
    batches: Iterable[Batch],
    *,
    num_blocks: int = 3,
    ranks: bool = True,
    rank: int | None = 10,
    num_classes: int = 5,
    epsilon: float = 0.1,
    epsilon_scale: str = "relative",
    path_epsilon: float = 1.0,
    num_perturbed: int = 16,
    seed: int = 0,
) -> dict[str, Any]:
    """Measures a model: dynamics over all images, phases, class paths, and perturbations of some images.

    Two passes: all images once through the model, then `num_perturbed` of them `num_groups * (L / 2 + 1)` times.

    Args:
        model (`Teacher` or `RaptorModel`): put in evaluation mode.
        batches (`Iterable`): as for [`~raptor_hf.interventions.measure_swaps`]; iterated twice. Labels give paths.
        num_blocks (`int`): phases to find in a ViT; those of a Raptor are its segments. At most the number of layers.
        ranks (`bool`), rank (`int`, *optional*): as for [`~raptor_hf.dynamics.DynamicsEstimator`].
        num_classes (`int`): classes `0..num_classes - 1` have their paths measured, if there are labels.
        epsilon (`float`), epsilon_scale (`str`), seed (`int`): of the sensitivity curve, see
            [`~raptor_hf.interventions.perturb`].
        path_epsilon (`float`): of the perturbed paths that are drawn, relative to the token's norm.
        num_perturbed (`int`): images that are perturbed, the first ones; 0 for none.

    Returns:
        `dict`: [`~raptor_hf.dynamics.Dynamics.to_dict`], with `"phases"` (layers of each), `"similarity"`, and per
        group `"paths"` in the plane of two principal components; plain values for strict JSON.

    Raises:
        ValueError: if there is no image, or an argument is out of range.
    """
    layout = layout_of(model)
    estimator = DynamicsEstimator(layout, ranks=ranks, num_classes=num_classes)

    def measured() -> Iterator[tuple[torch.Tensor, ...]]:
        """States of each batch, which the estimator has seen."""
        for pixel_values, labels in unpacked(batches, needs_labels=False):
            states = base_states(model, pixel_values)
            estimator.update(states, labels)
            yield states

    similarity = layer_similarity(measured(), layout=layout)
    dynamics = estimator.result(rank)
    schedule = None if isinstance(model, Teacher) else model.config.block_schedule
    if schedule is None:
        phases = list(find_phases(similarity, min(num_blocks, num_layers_of(model))).repeats)
    else:
        phases = [segment.num_layers for segment in schedule_segments(schedule)]
    record: dict[str, Any] = {
        **dynamics.to_dict(),
        "phases": phases,
        "block_schedule": schedule,
        "similarity": similarity.tolist(),
        "paths": {"classes": _class_paths(dynamics)},
    }
    if num_perturbed > 0:
        images = first_images(batches, num_perturbed)
        curve = sensitivity_curve(model, images, epsilon, scale=epsilon_scale, seed=seed)
        record["sensitivity"] = curve.to_dict()
        record["paths"]["perturbed"] = _perturbed_paths(model, images, path_epsilon, seed)
    return plain(record)


@torch.no_grad()
def compare_flows(reference: Model, model: Model, batches: Iterable[Batch]) -> dict[str, list[float]]:
    """Angle between the states of two models for the same images, such as a teacher and its Raptor (beyond the paper).

    Returns:
        `dict[str, list[float]]`: per token group of the reference, for the states `0..L`, the mean over images and
        tokens in radians.

    Raises:
        ValueError: if the models differ in layers, features or tokens, or there is no image.
    """
    layout = layout_of(reference)
    sums = torch.zeros(len(layout.groups), num_layers_of(reference) + 1, dtype=torch.float64)
    num_images = 0
    for pixel_values, _ in unpacked(batches, needs_labels=False):
        ours, theirs = base_states(reference, pixel_values), base_states(model, pixel_values)
        shapes = [(len(states), *states[0].shape[1:]) for states in (ours, theirs)]
        if shapes[0] != shapes[1] or layout != layout_of(model):
            raise ValueError(
                f"states (L + 1, seq_length, hidden_size) = {shapes[0]} and {shapes[1]}: the flows of two models "
                "compare layer by layer and token by token; give a Raptor and the teacher that it was made from."
            )
        for number, (first, second) in enumerate(zip(ours, theirs, strict=True)):
            for row, group in enumerate(layout.groups):
                angles = angle(layout.select(first, group), layout.select(second, group).to(first.device))
                sums[row, number] += angles.mean(dim=1).sum().cpu()
        num_images += len(pixel_values)
    return {group: (row / num_images).tolist() for group, row in zip(layout.groups, sums, strict=True)}


def _class_paths(dynamics: Dynamics) -> dict[str, Any]:
    """Paths of the classes that were seen, in the plane of their own two largest components (Fig. 8)."""
    record = {}
    for group, flow in dynamics.classes.items():
        seen = torch.nonzero(flow.counts).flatten().tolist()
        if seen and min(flow.paths.shape[1:]) >= 2:
            plane = principal_components(flow.paths[seen], 2)
            points = plane.transform(flow.paths[seen]).tolist()
            names = [f"class {number}" for number in seen]
            record[group] = {
                "explained": plane.explained_variance_ratio.tolist(),
                "paths": dict(zip(names, points, strict=True)),
            }
    return record


def _perturbed_paths(model: Model, images: list[torch.Tensor], epsilon: float, seed: int) -> dict[str, Any]:
    """Mean direction of each group from the state where it is perturbed on, beside the untouched run (Fig. 10)."""
    layout, num_layers = layout_of(model), num_layers_of(model)
    start, record = num_layers // 3, {}
    for group in layout.groups:
        base, moved, count = torch.zeros(1), torch.zeros(1), 0
        for pixel_values in images:
            states = base_states(model, pixel_values)
            pushed = perturb(model, states[start], start, group, epsilon, seed=seed, first_image=count)
            base = base + _mean_directions(states, layout.span(group))
            moved = moved + _mean_directions(pushed, layout.span(group))
            count += len(pixel_values)
        base, moved = base / count, moved / count
        if min(base.shape) < 2:
            continue
        plane = principal_components(base, 2)
        paths = {"base": plane.transform(base).tolist(), "perturbed": plane.transform(moved).tolist()}
        record[group] = {"explained": plane.explained_variance_ratio.tolist(), "paths": paths, "state": start}
    return record


def _mean_directions(states: Iterable[torch.Tensor], span: slice) -> torch.Tensor:
    """Per state, the sum over images of the mean direction of the tokens of a span."""
    return torch.stack([normalise(state[:, span]).mean(dim=1).sum(dim=0).cpu() for state in states])
