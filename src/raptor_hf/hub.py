"""A saved Raptor on the Hub: model, code, image processor and card in one commit, all checked before the first byte."""

import fnmatch
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from .card_edits import card_license, check_card, is_untouched, signed, update_card
from .cards import CARD_FILE, PICTURE_FILE, card_files, find_results, load_config, model_card, own_results, read_card
from .modeling_raptor import RaptorModel, RaptorPreTrainedModel
from .results import RESULTS_FILE, read_json
from .vision_models import public_name

logger = logging.get_logger(__name__)

WEIGHTS, INDEX, PROCESSOR = "model.safetensors", "model.safetensors.index.json", "preprocessor_config.json"
WEIGHT_FILES = ("model*.safetensors", INDEX)
CODE_FILES = (
    "tokens.py",
    "configuration_raptor.py",
    "modeling_raptor_layers.py",
    "modeling_raptor_init.py",
    "modeling_raptor_dense.py",
    "modeling_raptor.py",
)
# Nothing else of a folder is sent: no optimiser, no log, no script, no checkpoint that lies in it.
SENT_FILES = ("config.json", PROCESSOR, *WEIGHT_FILES, "*.onnx", *CODE_FILES)
# What is removed on the Hub when the folder has it no longer, since it would contradict the weights.
DERIVED_FILES = (*WEIGHT_FILES, "*.onnx", RESULTS_FILE, PICTURE_FILE)
_REFUSALS = {
    401: "the token is missing, wrong or expired; run `hf auth login`",
    403: "the token may not write there; use one with write access to this namespace",
    404: "it does not exist or is hidden from this token",
}


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    commit_message: str = "Upload Raptor",
    license: str | None = None,
    results: Mapping[str, Any] | None = None,
    overwrite_card: bool = False,
) -> CommitInfo:
    """Uploads a saved Raptor with its image processor and a model card, as one commit; the folder stays as it is.

    Folder and card are checked first, the card by the Hub's own rules too. Files that the Hub has already are not sent
    again; weights, exports and results that the folder no longer has are removed there. A card that somebody edited is
    kept but for its generated part: the one on the Hub if it was edited there since the last push, else the folder's.

    Args:
        folder: what `save_pretrained` of model and image processor left.
        repo_id: `name`, or `namespace/name`; created if absent.
        private: whether a new repository is private.
        revision: branch, made from `main` if absent; not with `create_pr`.
        create_pr: whether to open a pull request instead of writing to the branch.
        token: by default that of `HF_TOKEN` or `hf auth login`.
        commit_message: of the commit.
        license: licence in the card's metadata, such as `apache-2.0`.
        results: what the card shows; by default the `results.json` in the folder, or of the run it belongs to.
        overwrite_card: whether to replace an edited card.

    Returns:
        the commit, with its `commit_url` and `pr_url`.

    Raises:
        ValueError: if the folder is no complete Raptor, the card breaks a rule, there is no token, a repository that
            was to be private is public, or the Hub refuses the token.
        HfHubHTTPError, httpx.HTTPError: if the Hub cannot be reached; the same call can be made again.
    """
    folder = Path(folder)
    validate_repo_id(repo_id)
    check_folder(folder)
    results = find_results(folder) if results is None else results
    if create_pr and revision not in (None, "main"):
        raise ValueError(f"revision={revision!r} and create_pr exclude each other; a pull request is one to main.")
    model_card(folder, results, repo_id=repo_id, license=license)  # its rules, before anything is asked of the Hub
    token = token or get_token()
    if token is None:
        raise ValueError("no token for the Hub; run `hf auth login` or set HF_TOKEN.")
    api = HfApi(token=token)
    try:
        if "/" not in repo_id:
            repo_id = f"{api.whoami()['name']}/{repo_id}"
        exists = _check_visibility(api, repo_id, private)
        card = _card(api, folder, repo_id, revision if exists else None, results, license, overwrite_card)
        _validate_on_hub(card)
        if not exists:
            api.create_repo(repo_id, private=private, exist_ok=True)
        if revision not in (None, "main") and not create_pr:
            api.create_branch(repo_id, branch=str(revision), exist_ok=True)
        contents: dict[str, Any] = {path.name: path for path in sent_files(folder)}
        contents |= {"config.json": _public_config(folder), CARD_FILE: signed(card).encode()}
        contents |= card_files(folder, results, repo_id.split("/")[1])
        operations: list[Any] = [CommitOperationAdd(name, content) for name, content in contents.items()]
        stale = [name for name in api.list_repo_files(repo_id, revision=revision) if name not in contents]
        operations += [CommitOperationDelete(name) for name in stale if _matches(name, DERIVED_FILES)]
        return api.create_commit(
            repo_id, operations, commit_message=commit_message, revision=revision, create_pr=create_pr
        )
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in _REFUSALS:
            raise ValueError(f"{repo_id}: the Hub answers {status}; {_REFUSALS[status]}.") from error
        raise


def push_model(
    model: RaptorPreTrainedModel,
    image_processor: Any,
    repo_id: str,
    *,
    results: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> CommitInfo:
    """Uploads a Raptor in memory with its image processor and a card.

    Args:
        model: a loaded or trained Raptor, or a head on one.
        image_processor: its image processor.
        repo_id, kwargs: as [`push_folder`].
        results: what was measured of these very weights, as `results.json` has it; nothing by default.

    Raises:
        ValueError, HfHubHTTPError: as [`push_folder`].
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        image_processor.save_pretrained(folder)
        if results is not None and results.get("models"):
            results = own_results(results, results["models"][0])
        return push_folder(folder, repo_id, results=results or {}, **kwargs)


def sent_files(folder: str | Path) -> list[Path]:
    """Files of a folder that go to the Hub, beside the card and what it shows."""
    return sorted(path for path in Path(folder).iterdir() if path.is_file() and _matches(path.name, SENT_FILES))


def check_folder(folder: str | Path) -> None:
    """Checks that a folder is a whole Raptor that anyone can load.

    Raises:
        ValueError: if configuration, weights, code or image processor are missing, damaged or do not fit together.
    """
    folder = Path(folder)
    config = load_config(folder)
    again = "; save the model again with save_pretrained."
    names = {WEIGHTS}
    if (folder / INDEX).is_file():
        names = _shards(folder / INDEX)
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ValueError(f"{folder} lacks the weights {', '.join(missing)}{again}")
    if (folder / INDEX).is_file() and (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has {WEIGHTS} and {INDEX}, of two saves; delete the older one.")
    keys: set[str] = set()
    for name in sorted(names):
        try:
            with safe_open(folder / name, framework="pt") as file:
                keys.update(file.keys())
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged ({error}){again}") from error
    with torch.device("meta"):
        expected = set(RaptorModel(config).state_dict())
    lacking = sorted(expected - {key.removeprefix("raptor.") for key in keys})
    if lacking:
        raise ValueError(f"{folder} lacks {len(lacking)} weights, {lacking[0]} among them{again}")
    if not getattr(config, "auto_map", None) or not all((folder / name).is_file() for name in CODE_FILES):
        raise ValueError(f"{folder} lacks the code that loads it without raptor_hf{again}")
    if not (folder / PROCESSOR).is_file():
        raise ValueError(f"{folder} has no {PROCESSOR}; add it with image_processor.save_pretrained({str(folder)!r}).")
    read_json(folder / PROCESSOR)


def _shards(index: Path) -> set[str]:
    """Files that an index names."""
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not weight_map:
        raise ValueError(f"{index} names no weights; save the model again with save_pretrained.")
    return set(weight_map.values())


def _public_config(folder: Path) -> bytes:
    """The configuration, in which a teacher's folder is but a name."""
    data = read_json(folder / "config.json")
    if data.get("teacher_name_or_path"):
        data["teacher_name_or_path"] = public_name(data["teacher_name_or_path"])
    return f"{json.dumps(data, indent=2, sort_keys=True)}\n".encode()


def _validate_on_hub(card: str) -> None:
    try:
        ModelCard(card, ignore_metadata_errors=True).validate()
    except ValueError as error:
        raise ValueError(f"the Hub refuses the model card: {error}") from error


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _check_visibility(api: HfApi, repo_id: str, private: bool | None) -> bool:
    """Whether the repository exists; one that was to be private must not be public."""
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return False
    if private and not info.private:
        raise ValueError(f"{repo_id} is public already; make it private on the Hub first, or choose another name.")
    return True


def _card(
    api: HfApi,
    folder: Path,
    repo_id: str,
    revision: str | None,
    results: Mapping[str, Any] | None,
    license: str | None,
    overwrite: bool,
) -> str:
    """The card to send: generated, with what was added to the one in the folder, and to the one on the Hub."""
    own, remote = read_card(folder), _remote_card(api, repo_id, revision)
    license = license or card_license(own) or card_license(remote)
    card = model_card(folder, results, repo_id=repo_id, license=license)
    card = update_card(own, card, overwrite)
    if remote is not None and not is_untouched(remote):
        kept = update_card(remote, card, overwrite)
        if kept != card:
            logger.warning("The model card was edited on the Hub and is kept there; give overwrite_card to replace it.")
        card = kept
    check_card(card)
    return card


def _remote_card(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    with tempfile.TemporaryDirectory() as cache:
        for branch in dict.fromkeys((revision, None)):
            try:
                return read_card(Path(api.hf_hub_download(repo_id, CARD_FILE, revision=branch, cache_dir=cache)).parent)
            except (RevisionNotFoundError, EntryNotFoundError, RepositoryNotFoundError):
                continue
    return None
