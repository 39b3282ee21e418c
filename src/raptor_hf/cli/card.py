"""`raptor-hf card DIR`: the model card of a saved Raptor, drawn from its results."""

from dataclasses import dataclass, field
from pathlib import Path

from ..card_edits import is_edited
from ..cards import add_probe, find_results, own_results, write_card
from ..results import RESULTS_FILE, read_json
from .common import saved_raptor
from .console import note
from .parsing import parse
from .values import UsageError


@dataclass
class CardArguments:
    """The card."""

    _argument_group_name = "Card"

    folder: str | None = field(default=None, metadata={"help": "Folder of a saved Raptor (required)."})
    results: str | None = field(
        default=None, metadata={"help": "Run folder or results.json; default that of the run the model belongs to."}
    )
    probe: str | None = field(default=None, metadata={"help": "Run folder or results.json of `raptor-hf probe`."})
    repo_id: str | None = field(default=None, metadata={"help": "Where the model will be on the Hub."})
    license: str | None = field(default=None, metadata={"help": "Licence, as apache-2.0; mind the teacher's."})
    overwrite_card: bool = field(default=False, metadata={"help": "Whether to replace a card that was edited."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0.

    Raises:
        ValueError: for wrong input.
    """
    (args,) = parse("card", [CardArguments], argv, ["folder"], description=__doc__)
    saved_raptor(args.folder)
    folder = Path(args.folder)
    results = find_results(folder) if args.results is None else _model_results(Path(args.results), folder)
    if args.probe is not None:
        if results is None:
            raise UsageError(f"{folder} has no results that the probe could be added to; give --results.")
        parent = f"{folder.resolve().parent.name}/{folder.resolve().name}"
        add_probe(results, read_json(_file(Path(args.probe))), [results["models"][0]["name"], folder.name, parent])
    path = write_card(folder, results, repo_id=args.repo_id, license=args.license, overwrite=args.overwrite_card)
    note(f"wrote {path}" + ("" if results else "; no results were found, so all measurements read 'Not yet run'"))
    if is_edited(path.read_text(encoding="utf-8")):
        note("its generated part was edited, or it has none: it is kept as it was; --overwrite-card replaces it")
    return 0


def _file(path: Path) -> Path:
    return path / RESULTS_FILE if path.is_dir() else path


def _model_results(path: Path, folder: Path) -> dict:
    """Results of the model in `folder`: the one that has its path or its name, or the only one."""
    path = _file(path)
    results = read_json(path)
    models = results.get("models") or []
    mine = [model for model in models if (path.parent / str(model.get("path"))).resolve() == folder.resolve()]
    mine = mine or [model for model in models if model["name"] == folder.resolve().name]
    mine = mine or (models if len(models) == 1 else [])
    if not mine:
        raise UsageError(f"{path} names {len(models)} models and none in {folder}; give the results of its run.")
    return own_results(results, mine[0])
