"""From words to typed values: how the text of a flag, or of a configuration file, becomes a field of a dataclass.

`argument` says for a type hint what argparse needs to know; `read_config` reads a YAML or JSON file without deciding
what its words mean, which is up to the field that takes them.
"""

import argparse
import json
import re
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml

BOOL_WORDS = {word: True for word in ("true", "yes", "on", "t", "y", "1")}
BOOL_WORDS |= {word: False for word in ("false", "no", "off", "f", "n", "0")}

_SCALARS = (bool, int, float, Path, str)  # in the order in which the members of a union are tried: str takes any text
_CONTAINERS = (list, tuple, dict)


class UsageError(ValueError):
    """The user's mistake: `raptor_hf.cli.main` prints it on one line and returns 2."""


def argument(hint: Any) -> tuple[Any, type, dict[str, Any]] | None:
    """How text becomes a field of type `hint`.

    Args:
        hint (`Any`): a scalar, `Literal`, `Enum`, or a list, tuple or dict of them, or a union of these.

    Returns:
        `tuple`: type for `HfArgumentParser` (a class, or a function of the text), shape (`list`, `tuple`, `dict` or,
        for one value, `str`) and keywords of `add_argument`; None if no text can give such a field.
    """
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = [member for member in (typing.get_args(hint) if union else [hint]) if member is not type(None)]
    nested = [member for member in members if (typing.get_origin(member) or member) in _CONTAINERS]
    if nested:
        return _container(nested[0], or_text=str in members)
    if members == [bool]:
        return to_bool, str, {"nargs": "?", "const": True, "metavar": "BOOL"}
    if not all(_is_plain(member) for member in members):
        return None
    enums = [member for member in members if _is_enum(member)]
    if enums or (len(members) == 1 and typing.get_origin(members[0]) is Literal):
        return (enums or members)[0], str, {"metavar": None}
    metavar = "|".join(map(_metavar, members))
    return members[0] if len(members) == 1 else partial(_first_of, members), str, {"metavar": metavar}


def _is_enum(hint: Any) -> bool:
    """Whether `hint` is an Enum class."""
    return isinstance(hint, type) and issubclass(hint, Enum)


def _is_plain(hint: Any) -> bool:
    """Whether one word can give a value of type `hint`."""
    return hint in _SCALARS or typing.get_origin(hint) is Literal or _is_enum(hint)


def _container(hint: Any, or_text: bool) -> tuple[Any, type, dict[str, Any]] | None:
    """`argument` of a list, tuple or dict, `or_text` if the field also takes a plain text."""
    shape = typing.get_origin(hint) or hint
    if shape is dict:
        return partial(_mapping, or_text), dict, {"metavar": "JSON"}
    item = (*typing.get_args(hint), str)[0]
    if not _is_plain(item):
        return None

    def finish(items: list[Any]) -> Any:
        """The items in the field's own shape; a lone one as it is where a plain text is allowed."""
        return items[0] if or_text and len(items) == 1 else shape(items)

    action = partial(_ListAction, finish=finish)
    return partial(_items, item), shape, {"nargs": "+", "action": action, "metavar": _metavar(item)}


def _metavar(hint: Any) -> str:
    """Name of a scalar type in `--help`."""
    if typing.get_origin(hint) is Literal:
        return f"{{{','.join(map(str, typing.get_args(hint)))}}}"
    return hint.__name__.upper()


def to_bool(text: str) -> bool:
    """The truth value of a word of `BOOL_WORDS`, in either case.

    Raises:
        argparse.ArgumentTypeError: if it is another word; argparse adds the name of the flag.
    """
    if text.lower() not in BOOL_WORDS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(BOOL_WORDS)}, got '{text}'")
    return BOOL_WORDS[text.lower()]


def _convert(hint: Any, text: str) -> Any:
    """One value of a scalar, Literal or Enum type; an Enum's value stays text, as in `HfArgumentParser`."""
    if hint is bool:
        return to_bool(text)
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    if _is_enum(hint):
        choices = tuple(member.value for member in hint)
    table = {as_text(choice): choice for choice in choices}
    if choices and text not in table:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(table)}")
    try:
        return table[text] if choices else hint(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no {hint.__name__}") from None


def _first_of(members: list[Any], text: str) -> Any:
    """Value of a union: the first of its types that takes the text; of bool only true and false, words stay words."""
    for member in sorted(members, key=lambda member: _SCALARS.index(member) if member in _SCALARS else -1):
        try:
            return _convert(Literal[True, False] if member is bool else member, text)
        except argparse.ArgumentTypeError as error:
            last = error
    raise last


def _items(item: Any, text: str) -> list[Any]:
    """Items of a list in one token: a JSON array, or values with commas between them, which text may contain."""
    try:
        array = json.loads(text) if text.startswith("[") else None
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON array: {error}") from None
    parts = [text] if item is str else [part.strip() for part in text.split(",")]
    return [_convert(item, part) for part in (parts if array is None else map(as_text, array))]


def _mapping(or_text: bool, text: str) -> Any:
    """A JSON object as a dict; if `or_text`, other text (the name of a file) stays as it is."""
    if or_text and not text.startswith("{"):
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object such as {{\"key\": 1}}, got '{text}'")
    return value


def as_text(value: Any) -> str:
    """A value as it is written in a flag."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


class _ListAction(argparse.Action):
    """Joins the items of all tokens of a list option, also of one that is given again; `finish` makes the field's value
    of them.
    """

    def __init__(self, *args: Any, finish: Callable[[list[Any]], Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finish = finish

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        given = getattr(namespace, self.dest, [])
        given = [given] if isinstance(given, str) else list(given)
        setattr(namespace, self.dest, self.finish(given + [item for items in values for item in items]))


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration file, leaving every word of a YAML file as it is written.

    What a plain value means is up to the field that takes it: `no` is a strategy for one and false for another, `3e-4`
    is text in YAML 1.1. So only null, lists and mappings are told apart, and values inside a nested mapping, which no
    field describes, get YAML's types.

    Args:
        path (`Path`): a file that ends in .json, else it is read as YAML; UTF-8.

    Returns:
        `dict[str, Any]`: top-level keys to None, text, list or dict; of a JSON file also to bool, int and float.

    Raises:
        UsageError: if the file holds no mapping, a key twice or a key that is not a word.
        OSError: if it cannot be read.
        ValueError: if it is not valid JSON or UTF-8.
        yaml.YAMLError: if it is not valid YAML.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix.lower() == ".json":
        content = json.loads(text, object_pairs_hook=_unique)
        if not isinstance(content, dict):
            raise UsageError(f"must hold a JSON object, got {type(content).__name__}")
        return content
    loader = _TextLoader(text)
    loader.name = path.name
    node = loader.get_single_node()
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise UsageError("must hold lines of 'name: value'")
    _check_keys(node)
    loader.flatten_mapping(node)
    return {key.value: _yaml_value(loader, value) for key, value in node.value}


class _TextLoader(yaml.SafeLoader):
    """YAML without Python objects, with the exponents of YAML 1.2 (`3e-4`), which 1.1 takes for text."""


_TextLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _yaml_value(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """A node as `read_config` hands it on."""
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == "tag:yaml.org,2002:null" else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(loader, item) for item in node.value]
    return loader.construct_object(node, deep=True)


def _check_keys(node: yaml.Node) -> None:
    """Refuse a mapping, at any depth, with a key twice or a key that is not a word; YAML itself takes the last one."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"line {key.start_mark.line + 1}: a key must be a word")
            _check_keys(value)
        _unique([(key.value, None) for key, _ in node.value])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of `pairs`, or an error that names the key given twice."""
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"the key '{twice[0]}' is given twice; keep one")
    return dict(pairs)
