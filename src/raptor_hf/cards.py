"""Model cards: a saved Raptor and its `results.json` become a `README.md` for the Hub.

All numbers come from the results. The text stands between two marks that carry checksums, so that a card can be written
again: what somebody added around the marks is kept, what somebody changed between them makes the whole card theirs.
"""

import importlib.resources
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData
from transformers import AutoConfig

from . import plots
from .card_edits import assemble_card, card_license, check_card, is_hub_id, update_card
from .drawing import DPI
from .modeling_raptor import RaptorPreTrainedModel
from .phases import Phases
from .results import (
    ABSENT,
    RESULTS_FILE,
    TEACHER,
    as_number,
    as_text,
    json_text,
    probe_metric,
    read_json,
    to_plain,
    without_folders,
    write_file,
)
from .tokens import TOKEN_GROUPS
from .vision_models import public_name

CARD_FILE = "README.md"
PICTURE_FILE = "schedule.png"
_CLASSES = {
    "RaptorForImageClassification": ("AutoModelForImageClassification", "image-classification"),
    "RaptorForSemanticSegmentation": ("AutoModelForSemanticSegmentation", "image-segmentation"),
    "RaptorForDepthEstimation": ("AutoModelForDepthEstimation", "depth-estimation"),
}
_BASE = ("AutoModel", "image-feature-extraction")
_METRIC_NAMES = {"accuracy": "Top-1", "mean_iou": "Mean IoU", "rmse": "RMSE in metres"}
_LEVELS = 4  # folders above a model in which its results are looked for: quickstart/k3/seed0/model


def find_results(folder: str | Path) -> dict[str, Any] | None:
    """The results of a saved Raptor: its own copy, else those of the run above it, which names it by path."""
    folder = Path(folder).resolve()
    if (folder / RESULTS_FILE).is_file():
        return read_json(folder / RESULTS_FILE)
    for parent in folder.parents[:_LEVELS]:
        if (parent / RESULTS_FILE).is_file():
            results = read_json(parent / RESULTS_FILE)
            models = results.get("models") or []
            mine = [model for model in models if model.get("path") and (parent / model["path"]).resolve() == folder]
            if mine:
                return own_results(results, mine[0])
    return None


def own_results(results: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """What `results` say of one of its models, with the path `"."`: what is stored beside the model on the Hub.

    Other models, the curves of the training and absolute paths are left out.
    """
    plain = to_plain(results)
    training = {key: value for key, value in (model.get("training") or {}).items() if key != "history"}
    kept = {
        key: plain[key] for key in ("format", "command", "seed", "environment", "teacher", "dataset") if key in plain
    }
    kept["models"] = [{**to_plain(model), "path": ".", "training": to_plain(training)}]
    probe = plain.get("probe") or {}
    scores = {key: value for key, value in (probe.get("results") or {}).items() if key in (TEACHER, model["name"])}
    if model["name"] in scores:
        kept["probe"] = {**probe, "results": scores}
    return without_folders(kept)


def add_probe(results: dict[str, Any], probe_results: Mapping[str, Any], names: Sequence[str]) -> None:
    """Takes probe results of a run of its own into `results`; the model has one of `names` there.

    Raises:
        ValueError: if none of the names was probed.
    """
    probe = to_plain(probe_results).get("probe") or {}
    scores = probe.get("results") or {}
    name = next((name for name in names if name in scores), None)
    if name is None:
        raise ValueError(f"the probe results are of {', '.join(scores) or 'nothing'}, not of {' or '.join(names)}.")
    kept = {TEACHER: scores[TEACHER]} if TEACHER in scores else {}
    results["probe"] = {"dataset": None, **probe, "results": {**kept, results["models"][0]["name"]: scores[name]}}


def model_card(
    folder: str | Path,
    results: Mapping[str, Any] | None = None,
    *,
    repo_id: str | None = None,
    license: str | None = None,
) -> str:
    """The card of a saved Raptor.

    Without a `license` that of the card in the folder is kept.

    Args:
        folder: folder of the model, whose `config.json` names teacher and schedule.
        results: its results, as [`find_results`] gives them; what is absent reads "Not yet run".
        repo_id: where it will be on the Hub.
        license: identifier of a licence, such as `apache-2.0`; the teacher's applies to what is copied from it.

    Raises:
        ValueError: if `folder` holds no Raptor, or the metadata break a rule of [`check_card`].
    """
    config = load_config(folder)
    results = to_plain(results or {})
    entry = (results.get("models") or [{}])[0]
    name = entry.get("name") or (repo_id or Path(folder).resolve().name).split("/")[-1]
    architecture = (config.architectures or ["RaptorModel"])[0]
    auto_class, pipeline_tag = _CLASSES.get(architecture, _BASE)
    teacher_name = (results.get("teacher") or {}).get("name") or public_name(
        config.teacher_name_or_path or "its teacher"
    )
    teacher = f"[{teacher_name}](https://huggingface.co/{teacher_name})" if is_hub_id(teacher_name) else teacher_name
    whole, parameters = (results.get("teacher") or {}).get("num_parameters"), entry.get("num_parameters")
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(_template())
    probe = results.get("probe") or {}
    body = template.render(
        name=name,
        num_blocks=config.num_blocks,
        num_layers=config.num_hidden_layers,
        teacher=teacher,
        share=f"{100 * parameters / whole:.1f} %" if whole and parameters else None,
        picture=PICTURE_FILE if importlib.util.find_spec("matplotlib") else None,
        facts=_facts(config, entry),
        class_name=architecture if architecture in _CLASSES else "RaptorModel",
        auto_class=auto_class,
        repo_id=repo_id or f"org/{name}",
        fidelity=_fidelity_rows(entry.get("fidelity")),
        num_images=as_number((entry.get("fidelity") or {}).get("num_images"), form=",d"),
        probe=_probe_rows(probe, name),
        probe_heading=probe_metric(probe)[0],
        probe_text=_probe_text(probe, _probe_dataset(results)),
        training=_training_rows(results, entry),
        command=results.get("command"),
        planned=entry.get("planned", False),
        limits=_limits(results, entry, teacher),
    )
    license = license or card_license(read_card(folder))
    data = _card_data(results, name, teacher_name, license, pipeline_tag)
    card = assemble_card(data.to_yaml(), body)
    check_card(card)
    return card


def load_config(folder: str | Path) -> Any:
    """Configuration of a saved Raptor. Raises `ValueError` if `folder` holds none."""
    path = Path(folder) / "config.json"
    config = read_json(path) if path.is_file() else None
    if not isinstance(config, dict) or config.get("model_type") != "raptor":
        raise ValueError(
            f"{folder} is no folder of a saved Raptor; save_pretrained makes one, distill leaves OUT/model."
        )
    return AutoConfig.from_pretrained(folder)


def write_card(
    folder: str | Path,
    results: Mapping[str, Any] | None = None,
    *,
    repo_id: str | None = None,
    license: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes `README.md`, the picture of the schedule and the model's own `results.json` into its folder.

    A card that somebody edited is kept, see [`update_card`].

    Returns:
        path of the card.

    Raises:
        ValueError: as [`model_card`].
    """
    folder = Path(folder)
    if results is None:
        results = find_results(folder)
    new = model_card(folder, results, repo_id=repo_id, license=license)
    existing = read_card(folder)
    for name, content in card_files(folder, results).items():
        write_file(folder / name, content)
    return write_file(folder / CARD_FILE, update_card(existing, new, overwrite).encode())


def read_card(folder: str | Path) -> str | None:
    """The card in a folder, if there is one."""
    path = Path(folder) / CARD_FILE
    return path.read_text(encoding="utf-8") if path.is_file() else None


def card_files(folder: str | Path, results: Mapping[str, Any] | None, name: str | None = None) -> dict[str, bytes]:
    """What a card shows or is drawn from, by file name: the picture of the schedule, and results if there are any."""
    config = load_config(folder)
    name = ((results or {}).get("models") or [{}])[0].get("name") or name or Path(folder).resolve().name
    files = {}
    picture = schedule_picture(config.block_schedule, name)
    if picture is not None:
        files[PICTURE_FILE] = picture
    if results:
        files[RESULTS_FILE] = json_text(results).encode()
    return files


def schedule_picture(schedule: Sequence[int], name: str) -> bytes | None:
    """PNG of which block makes which layer; `None` without matplotlib."""
    try:
        figure = plots.schedule_figure({name: list(schedule)})
    except ImportError:
        return None
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _template() -> str:
    return importlib.resources.files(__package__).joinpath("templates", "model_card.md").read_text(encoding="utf-8")


def _card_data(
    results: Mapping[str, Any], name: str, teacher: str, license: str | None, pipeline_tag: str
) -> ModelCardData:
    dataset = (results.get("dataset") or {}).get("name")
    probe = results.get("probe") or {}
    score, metric = (probe.get("results") or {}).get(name) or {}, probe.get("metric") or "accuracy"
    evaluation = None
    if score.get("mean") is not None:
        evaluation = [
            EvalResult(
                task_type=probe.get("task") or "image-classification",
                dataset_type=_probe_dataset(results) or "images",
                dataset_name=_probe_dataset(results) or "images",
                metric_type=metric,
                metric_name=f"{_METRIC_NAMES[metric]} of a linear probe on the frozen features",
                metric_value=round(score["mean"], 6),
            )
        ]
    return ModelCardData(
        library_name="transformers",
        tags=list(RaptorPreTrainedModel.model_tags),
        pipeline_tag=pipeline_tag,
        base_model=teacher if is_hub_id(teacher) else None,
        datasets=[dataset] if dataset and is_hub_id(dataset) else None,
        license=license,
        model_name=name if evaluation else None,
        eval_results=evaluation,
    )


def _cell(value: Any) -> str:
    return as_text(value).replace("|", "\\|")


def _facts(config: Any, entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = {
        "Blocks by layer": str(Phases.from_schedule(config.block_schedule)),
        "Parameters": as_number(entry.get("num_parameters"), form=",d"),
        "Hidden size, heads": f"{config.hidden_size}, {config.num_attention_heads}",
        "Image, patch": f"{config.image_size} px, {config.patch_size} px; positions are interpolated for other sizes",
        "Registers": str(config.num_register_tokens),
    }
    return [(key, _cell(value)) for key, value in facts.items() if value != ABSENT]


def _mean(values: Sequence[float | None]) -> float | None:
    return None if not values or None in values else sum(v for v in values if v is not None) / len(values)


def _fidelity_rows(fidelity: Mapping[str, Any] | None) -> list[list[str]]:
    r2, cosine = ((fidelity or {}).get(key) or {} for key in ("r2", "cosine"))
    rows = []
    for group in ("all", *TOKEN_GROUPS):
        if group in r2:
            curve = r2[group]
            values = (_mean(curve), curve[0], curve[-1], _mean(cosine.get(group) or []))
            rows.append([group, *(as_number(value, form=".3f") for value in values)])
    return rows


def _probe_rows(probe: Mapping[str, Any], name: str) -> list[list[str]]:
    scores = probe.get("results") or {}
    if (scores.get(name) or {}).get("mean") is None:
        return []
    rows, scale = [], probe_metric(probe)[1]
    form = ".2f" if scale == 100 else ".3f"
    for key in (TEACHER, name):
        if key in scores:
            entry = scores[key]
            sigma = "" if entry.get("std") is None else f" ± {as_number(entry['std'], scale, form)}"
            rows.append(
                [key, as_number(entry["mean"], scale, form, sigma), as_number(entry.get("retained"), 100, ".1f", " %")]
            )
    return rows


def _probe_dataset(results: Mapping[str, Any]) -> str | None:
    """Images of the probe; those of the distillation where a run had but one set."""
    probe = results.get("probe") or {}
    return probe["dataset"] if "dataset" in probe else (results.get("dataset") or {}).get("name")


def _probe_text(probe: Mapping[str, Any], dataset: str | None) -> str:
    protocol = ", ".join(f"{key} {as_text(value)}" for key, value in (probe.get("protocol") or {}).items())
    on = f" on {dataset}" if dataset else ""
    return f"Linear probe{on}; ± is sigma over the heads. Protocol: {protocol}."


def _training_rows(results: Mapping[str, Any], entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    training = dict(entry.get("training") or {})
    if not training:
        return []
    dataset, versions = results.get("dataset") or {}, results.get("environment") or {}
    rows: dict[str, Any] = {}
    if dataset.get("name"):
        train, test = (_count(dataset.get(name)) for name in ("num_train", "num_test"))
        counts = f", {train} to train, {test} to measure" if "num_train" in dataset else ""
        rows["images"] = f"{dataset['name']}{counts}"
    rows |= {key: value for key, value in training.items() if value is not None and key != "history"}
    rows["seed"] = entry.get("seeds")
    rows["versions"] = {key: value for key, value in versions.items() if value is not None}
    return [(key, _cell(value)) for key, value in rows.items() if value]


def _limits(results: Mapping[str, Any], entry: Mapping[str, Any], teacher: str) -> list[str]:
    dataset = (results.get("dataset") or {}).get("name")
    limits = []
    if entry.get("planned"):
        limits.append("It does not exist yet: this is the plan of a run, and nothing of it was trained or measured.")
    elif dataset:
        limits.append(f"It was distilled and measured on images of {dataset}; what it does elsewhere was not measured.")
    if not ((results.get("probe") or {}).get("results") or {}):
        limits.append("No accuracy on a task has been measured.")
    if (entry.get("training") or {}).get("loss_scale") == "shared_variance":
        limits.append(
            "All errors of a layer were divided by one variance: registers and the cls token of early layers, which "
            "vary little, follow the teacher less than patches do."
        )
    limits.append(f"Embeddings and final norm are those of {teacher}, whose licence and limits apply too.")
    return limits


def _count(number: int | None) -> str:
    """A number of images; that of a stream is not known."""
    return "a stream" if number is None else str(number)
