"""The `raptor-hf` program: it picks the command, and turns every error into the right exit code.

Each command is a module of this package with `main(argv) -> int`, imported only when it is chosen, so that the list of
commands costs nothing and a missing optional dependency disturbs only the command that needs it.

Exit codes: 0 done, 1 failed (one line if the run stopped itself: a loss that is not finite, a full disk; silent if the
reader of our output went away; else with a traceback), 2 wrong input (one line), 130 interrupted, 143 SIGTERM.
"""

import difflib
import errno
import importlib
import os
import re
import sys
from collections.abc import Sequence

from .. import __version__

PROGRAM = "raptor-hf"
COMMANDS = {
    "quickstart": "train a small teacher on digits, find its phases, distil Raptors, probe them, write a report",
    "phases": "find the phases of a teacher: layer similarity in, block schedule out",
    "distill": "train a Raptor, a few weight-tied blocks, to reproduce a teacher's hidden states",
    "assemble": "join blocks that were trained apart, one run each, into one Raptor",
    "probe": "measure a frozen backbone on classification, segmentation or depth",
    "dynamics": "measure the flow of token states over depth: speed, ranks, coherence, spectra, perturbations",
    "study": "test phases: layers swapped, other partitions, recurrence, training paradigms, eps and bits",
    "report": "collect the results of runs in results.json, figures and report.html",
    "import-research": "turn a checkpoint of the paper's code into a folder for the Hub",
    "export": "write a saved Raptor as ONNX or torch.export, compared with the model",
    "card": "write the model card of a saved Raptor from its results",
    "push": "upload a saved Raptor with its processor and card to the Hub",
}
TRACEBACK_VARIABLE = "RAPTOR_HF_TRACEBACK"
"""Environment variable that, when set, shows the traceback of a wrong-input error too."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EXTRA_HINT = re.compile(r"raptor[-_]hf\[")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `raptor-hf` and return its exit code.

    Args:
        argv (`Sequence[str]`, *optional*): the arguments after the program's name, by default those of the process.

    Returns:
        `int`: 0, 1, 2, 130 or 143, as this module's docstring says.

    Raises:
        Exception: whatever the command raised that is neither the user's mistake nor an interruption; the interpreter
            then prints the traceback and exits with 1.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except SystemExit as exit_request:
        return _exit_code(exit_request.code)
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return 1
    return code


def _dispatch(arguments: list[str]) -> int:
    """Answer the program's own options, or hand the rest to the chosen command."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0
    if name == "--version":
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(COMMANDS)}"
        return _fail(PROGRAM, f"unknown command '{name}'; {advice}")
    return _run(name, arguments[1:])


def _run(name: str, arguments: list[str]) -> int:
    """Import the command `name`, run it, and map what it raises to an exit code."""
    # Not at the top: the list of commands must not wait for this import.
    from huggingface_hub.errors import StrictDataclassError

    program = f"{PROGRAM} {name}"
    try:
        command = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
        return int(command.main(arguments))
    except (ValueError, StrictDataclassError) as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        return _fail(program, str(error) or type(error).__name__)
    except RuntimeError as error:
        if not _is_stop(error) or os.environ.get(TRACEBACK_VARIABLE):
            raise
        return _fail(program, str(error), code=1)
    except OSError as error:
        if error.errno not in _NO_SPACE or os.environ.get(TRACEBACK_VARIABLE):
            raise
        return _fail(program, f"{error}; make room and run the same command again, what is finished is kept", code=1)
    except ImportError as error:
        if not _EXTRA_HINT.search(str(error)):
            raise
        return _fail(program, str(error))
    except KeyboardInterrupt:
        remedy = "run the same command again: finished stages and complete checkpoints in its output folder are kept"
        sys.stderr.write(f"\n{program}: interrupted; {remedy}\n")
        return 130


def _is_stop(error: RuntimeError) -> bool:
    """Whether a training stopped itself with a message. Imported here: a command that trains has done so already."""
    from ..safeguards import TrainingStopped

    return isinstance(error, TrainingStopped)


def _fail(program: str, message: str, code: int = 2) -> int:
    """Write `message` on one line of stderr and return `code`, by default that of wrong input.

    Of an error that a data loader's worker passed on with its traceback, the error alone is written.
    """
    if message.startswith("Caught "):
        message = message.rstrip().splitlines()[-1].split(": ", 1)[-1]
    sys.stderr.write(f"{program}: error: {' '.join(message.split())}\n")
    return code


def _exit_code(code: str | int | None) -> int:
    """Exit code of a `SystemExit`: nothing means 0, and a text is written to stderr and means 1."""
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        return 1
    return code or 0


def _stdout_is_closed() -> bool:
    """Whether the reader of our stdout went away (`raptor-hf phases ... | head -1`); if so, silence stdout.

    Another write tells a broken stdout from another broken pipe. Afterwards stdout leads nowhere, else the interpreter
    complains again when it exits.
    """
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _overview() -> str:
    """Text of `raptor-hf --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: {PROGRAM} COMMAND [FILE.yaml] [options]\n\n"
        "Vision Transformers rewritten as a few weight-tied blocks: find phases, distil, measure.\n\n"
        f"commands:\n{rows}\n\n"
        f"'{PROGRAM} COMMAND --help' lists a command's options, '{PROGRAM} --version' prints the version.\n"
    )
