"""From flags and one YAML or JSON file to typed dataclasses: the same rules for every command.

Built on transformers' `HfArgumentParser`, whose dataclasses (`TrainingArguments` among them) it takes unchanged. What
differs, and why:

- a configuration file's values are turned into flags and go through the same types, so that `lr: 3e-4` is a float and
  `save_strategy: no` stays a word: `HfArgumentParser.parse_yaml_file` hands over whatever YAML made of them;
- every boolean takes `--x`, `--no_x` and `--x false`, whatever its default; words are those of YAML (yes/no, on/off);
- a list is `--x 0 0 1`, `--x 0,0,1`, `--x [0,0,1]` or `--x 0 --x 0 --x 1`; a mapping is a JSON object;
- hyphens and underscores are the same in a flag; a flag is never guessed from its beginning;
- a mistake is one line with the nearest valid name, and exit code 2;
- `--help` shows a command's own options first and those inherited from the Trainer last.

A dataclass cannot have fields named `config` or `help`.
"""

import argparse
import copy
import dataclasses
import difflib
import inspect
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers.hf_argparser import HfArgumentParser

from .values import BOOL_WORDS, UsageError, argument, as_text, read_config, to_bool

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)
_PERCENT = re.compile(r"%(%|\([a-z_]+\)s)?")


def parse(
    command: str,
    dataclass_types: Sequence[type],
    argv: Sequence[str],
    positional: Sequence[str] = (),
    description: str | None = None,
) -> tuple[Any, ...]:
    """Fill the dataclasses of a command from its arguments.

    Values come from the dataclasses' defaults, then from a configuration file (`--config FILE`, or a free argument
    that ends in .yaml, .yml or .json), then from the flags; a null in the file means the default.

    Args:
        command (`str`): the command's name, for messages.
        dataclass_types (`Sequence[type]`): the dataclasses; their field names are the flags, `metadata["help"]` their
            help, `_argument_group_name` the heading of a class. A field whose type no text can give is no flag.
        argv (`Sequence[str]`): the arguments after the command's name.
        positional (`Sequence[str]`, *optional*): fields that free arguments fill, in this order; the last one takes
            all the rest if it is a list.
        description (`str`, *optional*): text at the top of `--help`.

    Returns:
        `tuple`: one instance per dataclass, in the order of `dataclass_types`.

    Raises:
        SystemExit: with code 2 after one line on stderr if the arguments or the file are wrong, 0 after `--help`.
        ValueError: from a dataclass's own `__post_init__`.
    """
    parser = CommandParser(dataclass_types, positional, prog=f"raptor-hf {command}", description=description)
    values = parser.parse_values(list(argv))
    names = [{field.name for field in dataclasses.fields(dtype)} for dtype in dataclass_types]
    return tuple(
        dtype(**{key: value for key, value in values.items() if key in known})
        for dtype, known in zip(dataclass_types, names, strict=True)
    )


def require_world_size(num_processes: int, command: str) -> None:
    """Refuse to go on when several processes were started but each would train alone.

    Args:
        num_processes (`int`): what the run sees, `accelerate.PartialState().num_processes`.
        command (`str`): how the command is given, for the message.

    Raises:
        UsageError: if the launcher's `WORLD_SIZE` or `LOCAL_WORLD_SIZE` exceeds `num_processes`.
    """
    sizes = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    started = max((int(size) for size in sizes if size.isdigit()), default=1)
    if started > num_processes:
        raise UsageError(
            f"{started} processes were started, but each sees a world of {num_processes} and would work alone; on "
            f"CPUs start them with: ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {started} "
            f"-m raptor_hf {command}"
        )


class CommandParser(HfArgumentParser):
    """`HfArgumentParser` with this module's rules; `parse` is the way to use it.

    Args:
        dataclass_types (`Sequence[type]`): as in `parse`.
        positional (`Sequence[str]`): as in `parse`.
        kwargs (`Any`): of `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Sequence[type], positional: Sequence[str] = (), **kwargs: Any) -> None:
        free = "".join(f" [{name.upper()}]" for name in positional)
        super().__init__(
            usage=f"%(prog)s{free} [FILE.yaml] [options]",
            epilog="Hyphens and underscores are the same in a flag; every boolean x takes --x, --no_x and --x false.",
            formatter_class=_ShortHelp,
            allow_abbrev=False,
            **kwargs,
        )
        self._negative_number_matcher = _NEGATIVE_NUMBER  # argparse's own takes -1e-4 for a flag
        self.positional = tuple(positional)
        self.source = ""  # the configuration file being read, for messages
        self.shapes: dict[str, type] = {}  # field name to list, tuple, dict or, for one value, str
        self.required: list[str] = []
        self.add_argument("--config", action="append", default=[], metavar="FILE", help="YAML or JSON file of values")
        inherited = []
        for dtype in dataclass_types:
            hints = typing.get_type_hints(dtype)
            group = self.add_argument_group(getattr(dtype, "_argument_group_name", dtype.__name__))
            own = _own_fields(dtype)
            for field in (field for field in dataclasses.fields(dtype) if field.init):
                if field.name in own:
                    self._add_field(group, field, hints[field.name])
                else:
                    inherited.append((field, hints[field.name]))
        trainer = self.add_argument_group("Trainer")
        for field, hint in inherited:
            self._add_field(trainer, field, hint)

    def error(self, message: str) -> NoReturn:
        """Write `message` on one line of stderr and exit.

        Raises:
            SystemExit: with code 2, always.
        """
        sys.stderr.write(f"{self.prog}: error: {' '.join(f'{self.source}{message}'.split())}\n")
        raise SystemExit(2)

    def parse_values(self, argv: Sequence[str]) -> dict[str, Any]:
        """Values of the fields that `argv` or its configuration file set; see `parse`.

        Raises:
            SystemExit: as `parse`.
        """
        if {"-h", "--help"} & set(argv):
            self.parse_args(["--help"])
        flags, free = self._separate(argv)
        words = self._place([token for token in free if not _is_config(token)])
        values = vars(self.parse_args(words + flags))
        files = values.pop("config") + [token for token in free if _is_config(token)]
        if len(files) > 1:
            self.error(f"one configuration file is enough, got {' and '.join(files)}")
        if files:
            values = self._parse_file(Path(files[0])) | values
        if missing := [f"--{name}" for name in self.required if name not in values]:
            self.error(f"missing {', '.join(missing)}; give it as a flag or in a configuration file")
        return values

    def _add_field(self, group: Any, field: dataclasses.Field, hint: Any) -> None:
        """Add the flag of a field, leaving its default to the dataclass, so that it is known what was set."""
        how = argument(hint)
        if how is None:
            return
        field = copy.copy(field)  # the base class writes to the field, which belongs to every subclass
        field.type, shape, extra = how
        if "choices" in field.metadata:
            extra.pop("metavar")
        metadata = {**field.metadata, **extra, "help": _helpas_text(field)}
        field.metadata = types.MappingProxyType(metadata)
        self._parse_dataclass_field(group, field)
        action = self._option_string_actions[f"--{field.name}"]
        if action.required:
            self.required.append(field.name)
        action.default, action.required = argparse.SUPPRESS, False
        self.shapes[field.name] = shape
        if action.type is to_bool:
            shown = f"the same as --{field.name} false" if field.default is True else argparse.SUPPRESS
            options = {"dest": field.name, "default": argparse.SUPPRESS, "help": shown}
            group.add_argument(f"--no_{field.name}", action="store_false", **options)

    def _separate(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Tell flags with their values, spelled as they are registered, from free arguments."""
        flags: list[str] = []
        free: list[str] = []
        action: argparse.Action | None = None  # the option that may take the next token
        for token in argv:
            if token.startswith("-") and not _NEGATIVE_NUMBER.match(token):
                name, equals, value = token.partition("=")
                name, action = self._find(name)
                flags.append(f"{name}{equals}{value}")
                if equals or action.nargs == 0:
                    action = None
            elif action is None or self._leaves_free(action, token):
                free.append(token)
            else:
                flags.append(token)
                action = action if action.nargs == "+" else None
        return flags, free

    def _leaves_free(self, action: argparse.Action, token: str) -> bool:
        """Whether `token` is a free argument although it follows a boolean, which may stand without a value."""
        expected = _is_config(token) or bool(self.positional)
        return action.type is to_bool and expected and token.lower() not in BOOL_WORDS

    def _find(self, name: str) -> tuple[str, argparse.Action]:
        """Registered spelling and action of a flag, or one line that suggests the nearest one."""
        known = self._option_string_actions
        spelling = name if name in known or name[:2] != "--" else f"--{name[2:].replace('-', '_')}"
        if spelling not in known:
            self.error(f"unknown option {name}; {self._nearest(spelling, known)}")
        return spelling, known[spelling]

    def _nearest(self, name: str, known: Iterable[str]) -> str:
        """Advice for an unknown name."""
        near = difflib.get_close_matches(name, known, n=1)
        return f"did you mean {near[0]}?" if near else f"see {self.prog} --help"

    def _place(self, words: list[str]) -> list[str]:
        """Turn free arguments into flags of the positional fields."""
        flags = []
        for name in self.positional:
            if words and self.shapes[name] in (list, tuple):
                flags.append(f"--{name}={json.dumps(words)}")
                words = []
            elif words:
                flags.append(f"--{name}={words[0]}")
                words = words[1:]
        if words:
            self.error(f"unexpected argument '{words[0]}'; see {self.prog} --help")
        return flags

    def _parse_file(self, path: Path) -> dict[str, Any]:
        """Values of a configuration file, converted by the types of the flags."""
        self.source = f"{path}: "
        try:
            content = read_config(path)
        except OSError as error:
            self.error(f"cannot be read: {error.strerror}")
        except (ValueError, yaml.YAMLError) as error:
            self.error(str(error))
        flags: dict[str, str] = {}
        for key, value in content.items():
            name = key.replace("-", "_")
            if name not in self.shapes:
                self.error(f"unknown key '{key}'; {self._nearest(name, self.shapes)}")
            if name in flags:
                self.error(f"the key '{name}' is given twice, with hyphens and with underscores")
            if value is not None:
                flags[name] = f"--{name}={self._fileas_text(key, value, self.shapes[name])}"
        values = vars(self.parse_args(list(flags.values())))
        values.pop("config")
        self.source = ""
        return values

    def _fileas_text(self, key: str, value: Any, shape: type) -> str:
        """A value of a configuration file as it is written in a flag."""
        if isinstance(value, dict) and shape is not dict:
            self.error(f"'{key}' cannot be a mapping; nested keys are for options that take a JSON object")
        if isinstance(value, list) and shape not in (list, tuple):
            self.error(f"'{key}' takes one value, got a list of {len(value)}")
        if isinstance(value, list) and any(item is None or isinstance(item, list | dict) for item in value):
            self.error(f"'{key}' takes a list of plain values, without null, lists or mappings in it")
        return as_text(value)


class _ShortHelp(argparse.HelpFormatter):
    """Help that shows one spelling of a flag: `--learning_rate FLOAT`."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.nargs == 0:
            return ", ".join(action.option_strings)
        return f"{action.option_strings[0]} {self._format_args(action, action.dest.upper())}"


def _own_fields(dtype: type) -> set[str]:
    """Fields that `dtype` or a parent outside transformers declares."""
    classes = (cls for cls in dtype.__mro__ if cls.__module__.partition(".")[0] != "transformers")
    return {name for cls in classes for name in inspect.get_annotations(cls)}


def _helpas_text(field: dataclasses.Field) -> str:
    """Help of a field with its default; a percent sign that formats nothing is text."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    text = str(field.metadata.get("help", ""))
    if default is dataclasses.MISSING:
        text += " (required)"
    elif default not in (None, "", [], (), {}):
        text += f" (default: {default.value if isinstance(default, Enum) else default})"
    return _PERCENT.sub(lambda match: match[0] if match[1] else "%%", text).strip()


def _is_config(token: str) -> bool:
    """Whether a free argument names a configuration file."""
    return token.lower().endswith(CONFIG_SUFFIXES)
