"""Sections of the report on the studies: the flow over depth, layers replaced, partitions; and their tables as text."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from . import flow_plots, plots, study_plots
from .phases import Phases
from .report_blocks import Block, figure_block, table_block
from .results import as_number

# Curves of `results["dynamics"]`: axis, caption, whether of states (else of layers), logarithmic scale.
FLOW_CURVES = {
    "convergence": ("cosine with the last state", "Directional convergence; band: 5 to 95 % of images", True, False),
    "norm": ("norm of the states", "Norm of the states; band: 5 to 95 % of images", True, True),
    "angular_speed": ("angular speed (rad / layer)", "Angular speed; band: 5 to 95 % of images", False, False),
    "effective_rank": ("effective rank", "Effective rank of the angular updates of all images", False, True),
    "stable_rank": ("stable rank", "Stable rank of the angular updates of all images", False, True),
    "coherence": ("coherence", "Mean cosine of an angular update with the mean update", False, False),
    "sensitivity": (
        "(1 − cos) / ε at the last state", "Sensitivity of a group's last state to a perturbation of it", True, True
    ),
}  # fmt: skip
FLOW_PATHS = {
    "classes": "class means of the normalised states; open marker: state 0, filled: last state, small: end of a phase",
    "perturbed": "mean direction of perturbed and untouched runs; open marker: where a path starts",
}
SWAP_VALUES = {"accuracy": ("top-1 accuracy (%)", 100), "cosine": ("cosine with the untouched last state", 1)}
# Curves of an iteration past the end of a phase: axis, whether the first is of no application, logarithmic scale.
ITERATION_CURVES = {
    "speed": ("angle of an application (rad)", False, True),
    "agreement": ("agreement of the images", True, False),
    "norm": ("norm / norm behind the phase", True, True),
}
PHASES_HEADER = "Model|Type|Tokens|Blocks|Phases|Score".split("|")
PARTITIONS_HEADER = "Blocks|Partition|Runs|Top-1 (%)|Sigma (%)|Retained|Mean R²|Sigma|Last-layer R²".split("|")
SWAPS_HEADER = "Model|Phases|Replaced|Swaps|Cosine|Sigma|Top-1 (%)|Sigma (%)|Retained".split("|")
RECURRENCE_HEADER = (
    "Model|Phase|Tokens|At rest|Cycle|Turn|Agreement|Step map|Map of ends|No map|"
    "Last: step map|Last: map of ends|Last: no map"
).split("|")
COMPLEXITY_HEADER = (
    "Model|Precision|Blocks|Parameters|Mbit|Coded Mbit|Of teacher|Schedule bits|log2 FLOPs|Time|Max eps|Relative"
).split("|")
PARADIGMS_HEADER = "Paradigm|Stage|Runs|Top-1 (%)|Sigma (%)|Retained|Mean R²|Sigma|Last-layer R²".split("|")
FLOW_HEADER = (
    "Model|Tokens|Speed (rad)|Fastest|Effective rank (first to last)|Coherence peak|Median modulus|Spectral radius"
).split("|")


def similarities_blocks(results: Mapping[str, Any]) -> list[Block]:
    """Heat maps of the token groups of one ViT, or of every one that was compared, and the phases of the latter."""
    several = results.get("phases_of") or {}
    phases = results.get("phases") or {}
    name = (results.get("teacher") or {}).get("name") or "teacher"
    records = several or ({name: phases} if len(phases.get("groups") or {}) > 1 else {})
    if not records:
        return []
    repeats = {}
    for model, record in records.items():
        counts = sorted(record["partitions"], key=int)
        shown = counts[len(counts) // 2] if counts else None
        if shown and Phases.from_schedule(record["partitions"][shown]["block_schedule"]).is_contiguous:
            repeats[model] = record["partitions"][shown]["repeats"]
    figure = study_plots.similarities_figure({model: r["groups"] for model, r in records.items()}, repeats)
    numbers = {f"k = {len(parts)}" for parts in repeats.values()}
    squares = f"; squares: its phases, {', '.join(sorted(numbers))}" if numbers else ""
    blocks = [figure_block("similarity_groups", figure, f"Similarity of layers by token group{squares}")]
    if several:
        blocks.append(table_block("Phases that were found", phases_rows(several), PHASES_HEADER))
    return blocks


def phases_rows(records: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Rows under `PHASES_HEADER` of the models that were compared."""
    return [
        [model, record["model_type"], ", ".join(name for name in record["groups"] if name != "all"), count,
         str(Phases.from_schedule(entry["block_schedule"])), as_number(entry["score"], form=".3f")]
        for model, record in records.items()
        for count, entry in record["partitions"].items()
    ]  # fmt: skip


def swap_rows(records: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """`results["studies"]["swaps"]` as rows of text under `SWAPS_HEADER`, one per model, scope and number."""
    rows = []
    for name, record in records.items():
        for entry in record["summary"]:
            cosine, accuracy = entry["cosine"]["all"], entry["accuracy"] or {}
            possible = record["num_possible"][entry["scope"]][str(entry["num_swapped"])]
            share = accuracy["mean"] / record["base_accuracy"] if accuracy and record["base_accuracy"] else None
            row = [name, entry["scope"], str(entry["num_swapped"]), f"{entry['num_swaps']} of {possible}"]
            row += [as_number(cosine["mean"], form=".4f"), as_number(cosine["std"], form=".4f")]
            row += [as_number(accuracy.get("mean"), 100), as_number(accuracy.get("std"), 100)]
            rows.append([*row, as_number(share, form=".3f")])
    return rows


def flow_curves(record: Mapping[str, Any], key: str) -> dict[str, dict[str, Any]]:
    """One measure of `results["dynamics"]["models"][name]` by token group, with a band if it is of images."""
    if key == "sensitivity":
        found = record.get("sensitivity") or {}
        return {group: {"mean": curve} for group, curve in (found.get("per_eps") or {}).items()}
    curves = {}
    for group, entry in record["groups"].items():
        if key in entry:
            value = entry[key]
            quantiles = value["quantiles"] if isinstance(value, Mapping) else {}
            band = {"low": quantiles["0.05"], "high": quantiles["0.95"]} if quantiles else {}
            curves[group] = {"mean": value["mean"] if isinstance(value, Mapping) else value, **band}
    return curves


def flow_rows(models: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """What the curves of `results["dynamics"]["models"]` come down to: rows of text under `FLOW_HEADER`, one per model
    and token group. Speed is the mean over layers, ranks are of the first and the last layer.
    """
    rows = []
    for name, group, entry in ((name, *item) for name, record in models.items() for item in record["groups"].items()):
        speed, ranks = entry["angular_speed"]["mean"], entry.get("effective_rank") or [None]
        coherence, modes = entry["coherence"], entry["dmd"]
        row = [
            name,
            group,
            as_number(sum(speed) / len(speed), form=".3f"),
            str(1 + speed.index(max(speed))),
            " to ".join(dict.fromkeys(as_number(rank, form=".1f") for rank in (ranks[0], ranks[-1]))),
            str(1 + coherence.index(max(coherence))),
            as_number(modes["median_modulus"], form=".3f"),
            as_number(modes["spectral_radius"], form=".3f"),
        ]
        rows.append(row)
    return rows


def dynamics_section(results: dict[str, Any]) -> list[Block]:
    """Fig. 8 to 12 of the paper, models side by side, and what they come down to as a table."""
    part = results.get("dynamics") or {}
    models: dict[str, Any] = part.get("models") or {}
    boundaries = {name: flow_plots.phase_boundaries(record["phases"]) for name, record in models.items()}
    blocks = []
    for key, (label, caption, is_state, log) in FLOW_CURVES.items():
        curves = {name: flow_curves(record, key) for name, record in models.items()}
        values = [value for groups in curves.values() for curve in groups.values() for value in curve["mean"]]
        if any(value is not None and (value > 0 or not log) for value in values):
            figure = flow_plots.flow_figure(curves, label, boundaries, of_states=is_state, log=log)
            blocks.append(figure_block(f"dynamics_{key}", figure, caption))
    eigenvalues = {
        name: {group: entry["dmd"]["eigenvalues"] for group, entry in record["groups"].items()}
        for name, record in models.items()
    }
    if eigenvalues:
        caption = "Eigenvalues of dynamic mode decomposition, mean token of each group, with the unit circle"
        blocks.append(figure_block("dynamics_eigenvalues", flow_plots.eigenvalue_figure(eigenvalues), caption))
        blocks.append(table_block("The flow in numbers", flow_rows(models), FLOW_HEADER))
    for name, record in models.items():
        for kind, caption in FLOW_PATHS.items():
            if groups := record["paths"].get(kind):
                paths = {group: entry["paths"] for group, entry in groups.items()}
                shares = {group: entry["explained"] for group, entry in groups.items()}
                figure = flow_plots.path_figure(paths, shares, boundaries[name])
                stem = re.sub(r"[^\w.-]+", "_", name)
                blocks.append(figure_block(f"dynamics_{kind}_{stem}", figure, f"{name}: {caption}"))
    if part.get("angles"):
        figure = flow_plots.flow_figure(part["angles"], "angle to the first model (rad)", boundaries, of_states=True)
        blocks.append(figure_block("dynamics_angles", figure, "Angle between states of a model and of the first one"))
    return blocks


def partition_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """`results["studies"]["partitions"]` as rows of text under `PARTITIONS_HEADER`, by blocks and scheme."""
    rows, base = [], record["base_accuracy"]
    for count, runs in record["runs"].items():
        for scheme in dict.fromkeys(run["scheme"] for run in runs):
            own = [run for run in runs if run["scheme"] == scheme]
            rows.append([count, scheme, *_run_cells(own, base)])
    return rows


def paradigm_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """`results["studies"]["paradigms"]` as rows of text under `PARADIGMS_HEADER`, one per paradigm."""
    rows = []
    for paradigm in dict.fromkeys(run["paradigm"] for run in record["runs"]):
        own = [run for run in record["runs"] if run["paradigm"] == paradigm]
        rows.append([paradigm, own[0]["stage"], *_run_cells(own, record["base_accuracy"])])
    return rows


def _run_cells(runs: Sequence[Mapping[str, Any]], base: float | None) -> list[str]:
    """Number of runs, and means with sigma over them: accuracy, its share of `base`, R2."""
    means, sigmas = {}, {}
    for key in ("accuracy", "r2", "r2_last"):
        values = [run[key] for run in runs if run[key] is not None]
        means[key] = fmean(values) if values else None
        sigmas[key] = stdev(values) if len(values) > 1 else None
    share = means["accuracy"] / base if base and means["accuracy"] is not None else None
    return [
        str(len(runs)),
        as_number(means["accuracy"], 100),
        as_number(sigmas["accuracy"], 100),
        as_number(share, form=".3f"),
        as_number(means["r2"], form=".3f"),
        as_number(sigmas["r2"], form=".3f"),
        as_number(means["r2_last"], form=".3f"),
    ]


def paradigms_section(results: dict[str, Any]) -> list[Block]:
    """Fig. 5 of the paper, measured: how far a free rollout drifts under each training paradigm."""
    record: dict[str, Any] = (results.get("studies") or {}).get("paradigms") or {}
    if not record:
        return []
    curves: dict[str, list[Any]] = {}
    for paradigm in dict.fromkeys(run["paradigm"] for run in record["runs"]):
        own = [run["r2_layers"] for run in record["runs"] if run["paradigm"] == paradigm]
        columns = ([value for value in column if value is not None] for column in zip(*own, strict=True))
        curves[paradigm] = [fmean(column) if column else None for column in columns]
    boundaries = flow_plots.phase_boundaries(record["phases"])
    figure = plots.layer_curves_figure(curves, "R² with the teacher, free rollout", boundaries=boundaries)
    caption = "R² of each layer, all tokens, mean over runs; blocks run on their own states"
    rows = paradigm_rows(record)
    return [
        figure_block("paradigms_r2", figure, caption),
        table_block("Raptors of each paradigm; sigma is over runs", rows, PARADIGMS_HEADER),
    ]


def partitions_section(results: dict[str, Any]) -> list[Block]:
    """Fig. 2 and 3 of the paper."""
    record: dict[str, Any] = (results.get("studies") or {}).get("partitions") or {}
    if not record:
        return []
    figure = study_plots.scores_figure(record["scores"], record["elbow"], record["stability"], record["num_layers"])
    caption = "Score of the best partition, and how often a boundary is found when images are drawn anew"
    blocks = [figure_block("partition_scores", figure, f"{caption} ({record['num_images']:,} images)")]
    references = {"accuracy": record["base_accuracy"], "r2": None}
    for key, (label, scale) in {"accuracy": ("top-1 accuracy (%)", 100), "r2": ("mean R² with the teacher", 1)}.items():
        values: dict[str, dict[int, list[float]]] = {}
        for count, runs in record["runs"].items():
            for run in runs:
                if run[key] is not None:
                    values.setdefault(run["scheme"], {}).setdefault(int(count), []).append(scale * run[key])
        if values:
            base = references[key]
            line = None if base is None else ("teacher", scale * base)
            figure = study_plots.runs_figure(values, "blocks", label, line)
            blocks.append(figure_block(f"partitions_{key}", figure, "Every point is one Raptor; bars are their means"))
    if record["runs"]:
        rows = partition_rows(record)
        blocks.append(table_block("Raptors of each partition; sigma is over runs", rows, PARTITIONS_HEADER))
    return blocks


def studies_section(results: dict[str, Any]) -> list[Block]:
    """Fig. 15 of the paper for each model."""
    records: dict[str, Any] = (results.get("studies") or {}).get("swaps") or {}
    blocks = []
    for name, record in records.items():
        stem = re.sub(r"[^\w.-]+", "_", name)
        for key, (label, scale) in SWAP_VALUES.items():
            values: dict[str, dict[int, list[float]]] = {}
            for effect in record["effects"]:
                value = effect["cosine"]["all"] if key == "cosine" else effect[key]
                if value is not None:
                    values.setdefault(effect["scope"], {}).setdefault(len(effect["swap"]), []).append(scale * value)
            if values:
                base = record["base_accuracy"] if key == "accuracy" else 1.0
                figure = study_plots.runs_figure(values, "layers replaced", label, ("untouched model", scale * base))
                caption = f"{name}: every point is one swap; bars are their means"
                blocks.append(figure_block(f"swaps_{key}_{stem}", figure, caption))
    if records:
        blocks.append(table_block("Layers replaced; means and sigma over swaps", swap_rows(records), SWAPS_HEADER))
    return blocks


def recurrence_rows(records: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """`results["studies"]["recurrence"]` as rows of text under `RECURRENCE_HEADER`, one per model, phase and group.

    Shares of tokens that end at a fixed direction and in a cycle, angle in radians of the last application and
    agreement of the images behind it, cosine of each map with the state behind the phase, and with the last state.
    """
    rows = []
    for name, record in records.items():
        for walk in record["iterations"]:
            maps = record["spans"]["phases"][walk["phase"]] if record["spans"] else {}
            for group in walk["speed"]:
                ends = walk["ends"][group]
                row = [name, _phase_name(record, walk["phase"]), group, f"{ends['fixed']:.2f}", f"{ends['cycle']:.2f}"]
                row += [
                    as_number(walk["speed"][group][-1], form=".3f"),
                    as_number(walk["agreement"][group][-1], form=".3f"),
                ]
                cosines = [groups[group]["cosine"] for groups in maps.get("state", {}).values()]
                cosines += [entry["cosine"][group] for entry in maps.get("final", {}).values()]
                rows.append([*row, *(as_number(value, form=".3f") for value in cosines or [None] * 6)])
    return rows


def recurrence_section(results: dict[str, Any]) -> list[Block]:
    """Whether each phase is one recurrent map (beyond the paper)."""
    records: dict[str, Any] = (results.get("studies") or {}).get("recurrence") or {}
    blocks = []
    for name, record in records.items():
        stem = re.sub(r"[^\w.-]+", "_", name)
        for key, (label, scale) in SWAP_VALUES.items():
            values: dict[str, dict[int, list[float]]] = {}
            for effect in record["lengths"]:
                value = effect["cosine"]["all"] if key == "cosine" else effect[key]
                if value is not None:
                    series = values.setdefault(f"layers {_phase_name(record, effect['phase'])}", {})
                    series[effect["offset"]] = [scale * value]
            if values:
                base = record["base_accuracy"] if key == "accuracy" else 1.0
                reference = ("untouched model", scale * base)
                figure = study_plots.runs_figure(values, "applications more than the model's", label, reference)
                blocks.append(figure_block(f"lengths_{key}_{stem}", figure, f"{name}: a phase shorter or longer"))
        for key, (label, of_states, log) in ITERATION_CURVES.items():
            curves = {f"layers {_phase_name(record, walk['phase'])}": walk[key] for walk in record["iterations"]}
            if any(value for groups in curves.values() for curve in groups.values() for value in curve):
                figure = flow_plots.flow_figure(
                    curves, label, of_states=of_states, log=log, xlabel="applications past the end"
                )
                caption = f"{name}: the last layer of each phase, applied again and again"
                blocks.append(figure_block(f"iterations_{key}_{stem}", figure, caption))
    blocks += _exponent_blocks(records)
    if records:
        caption = "Phases as one map: at rest after the last application, and maps fitted on other images (cosines)"
        blocks.append(table_block(caption, recurrence_rows(records), RECURRENCE_HEADER))
    return blocks


def _exponent_blocks(records: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    found = {name: record["exponents"] for name, record in records.items() if record["exponents"]}
    if not found:
        return []
    boundaries = {name: flow_plots.phase_boundaries(records[name]["phases"]) for name in found}
    rates = {
        name: {f"direction {number}": rate for number, rate in enumerate(entry["rates"], start=1)}
        | {"norm of the state": entry["state_growth"]}
        for name, entry in found.items()
    }
    figure = flow_plots.flow_figure(rates, "growth (nats / layer)", boundaries)
    blocks = [figure_block("exponents", figure, "Growth of displacements that are followed from the embeddings on")]
    shares = {name: entry["shares"] for name, entry in found.items()}
    figure = flow_plots.flow_figure(shares, "share of direction 1", boundaries)
    return [*blocks, figure_block("exponent_shares", figure, "Where the displacement that grows most lies")]


def _phase_name(record: Mapping[str, Any], phase: int) -> str:
    last = sum(record["phases"][: phase + 1])
    first = last - record["phases"][phase] + 1
    return f"{first}" if first == last else f"{first}-{last}"


def complexity_rows(record: Mapping[str, Any], teacher: str) -> list[list[str]]:
    """`results["studies"]["complexity"]` as rows of text under `COMPLEXITY_HEADER`, one per model and precision.

    Lengths are those of blocks; the share is of coded bits. Time and eps are relative to the teacher named `teacher`:
    the largest expected Frobenius error of a layer, and the largest relative one.
    """
    rows = []
    for name, entry in {teacher: record["teacher"], **record["models"]}.items():
        for dtype, length in entry["lengths"].items():
            share = length["coded_bits"] / record["teacher"]["lengths"][dtype]["coded_bits"]
            row = [name, dtype, str(length["num_blocks"]), f"{length['num_parameters']:,}"]
            row += [f"{length['block_bits'] / 1e6:.1f}", f"{length['coded_bits'] / 1e6:.1f}", f"{share:.3f}"]
            row += [str(length["schedule_bits"]), f"{length['log2_flops']:.3f}"]
            error, runtime = entry.get("error") or {}, entry.get("runtime") or {}
            relative = [value for value in error.get("relative", ()) if value is not None]
            row += [as_number(runtime.get("median"), form=".3f"), as_number(error.get("max_epsilon"), form=".2f")]
            rows.append([*row, as_number(max(relative, default=None), form=".3f")])
    return rows


def complexity_section(results: dict[str, Any]) -> list[Block]:
    """Eps of the Block-Recurrent Hypothesis by layer, and the parts of the bound on Levin complexity."""
    record: dict[str, Any] = (results.get("studies") or {}).get("complexity") or {}
    if not record:
        return []
    blocks = []
    for key, label in {"epsilon": "eps (Frobenius error)", "relative": "eps / norm of the teacher's state"}.items():
        curves = {name: entry["error"][key] for name, entry in record["models"].items()}
        if any(value is not None for curve in curves.values() for value in curve):
            figure = flow_plots.flow_figure({"models": curves}, label)
            blocks.append(figure_block(f"complexity_{key}", figure, "Expected error of the states of each layer"))
    rows = complexity_rows(record, record["name"])
    return [*blocks, table_block("Length of the blocks, operations, and error", rows, COMPLEXITY_HEADER)]
