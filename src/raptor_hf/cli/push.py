"""`raptor-hf push DIR ORG/NAME`: a saved Raptor with its processor and card to the Hub, checked first, one commit."""

from dataclasses import dataclass, field

from .common import push_and_report
from .parsing import parse
from .values import UsageError


@dataclass
class PushArguments:
    """The upload. The token is that of HF_TOKEN or `hf auth login`."""

    _argument_group_name = "Push"

    folder: str | None = field(default=None, metadata={"help": "Folder of a saved Raptor (required)."})
    repo_id: str | None = field(default=None, metadata={"help": "Repository, as org/name (required)."})
    private: bool = field(default=False, metadata={"help": "Whether a new repository is private."})
    revision: str | None = field(default=None, metadata={"help": "Branch; made if absent. Default main."})
    create_pr: bool = field(default=False, metadata={"help": "Whether to open a pull request."})
    commit_message: str = field(default="Upload Raptor", metadata={"help": "Message of the commit."})
    license: str | None = field(default=None, metadata={"help": "Licence, as apache-2.0; mind the teacher's."})
    overwrite_card: bool = field(default=False, metadata={"help": "Whether to replace a card that was edited."})


def main(argv: list[str]) -> int:
    """Runs the command; exit code 0, or 1 if the Hub could not be reached.

    Raises:
        ValueError: for wrong input.
    """
    (args,) = parse("push", [PushArguments], argv, ["folder", "repo_id"], description=__doc__)
    if args.folder is None or args.repo_id is None:
        raise UsageError("give a folder and a repository: raptor-hf push runs/k3/model org/raptor-dinov2-b-k3.")
    return push_and_report(
        args.folder, args.repo_id, private=args.private or None, revision=args.revision, create_pr=args.create_pr,
        commit_message=args.commit_message, license=args.license, overwrite_card=args.overwrite_card,
    )  # fmt: skip
