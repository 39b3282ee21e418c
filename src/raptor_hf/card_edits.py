"""What of a model card is generated and what is somebody's own, by checksums in it; and the rules of its metadata."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_MARKED = re.compile(r"<!-- raptor_hf:begin (\w+) (\w+) -->\n(.*?)<!-- raptor_hf:end -->\n?", re.DOTALL)
_PUSHED = re.compile(r"\n?<!-- raptor_hf:pushed (\w+) -->\s*\Z")


def is_hub_id(name: str | None) -> bool:
    """Whether `name` has the form `namespace/name` of the Hub and is not a folder here."""
    return bool(name and _HUB_ID.fullmatch(name) and not Path(name).exists())


def check_card(card: str) -> None:
    """Checks a card by the Hub's rules that need no Hub.

    Raises:
        ValueError: if the metadata are missing or no YAML mapping, a licence is no identifier, `base_model` or
            `datasets` name something that is no Hub id, or a result is no finite number.
    """
    match = _FRONT.match(card)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        raise ValueError(f"the model card's metadata are no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ValueError("the model card has no metadata; it begins with a block of YAML between two lines of ---.")
    license = data.get("license")
    if license is not None and not (isinstance(license, str) and _LICENSE.fullmatch(license)):
        raise ValueError(
            f"license={license!r} in the model card is no identifier of the Hub, such as apache-2.0 or mit."
        )
    for key in ("base_model", "datasets"):
        values = data.get(key) or []
        for value in [values] if isinstance(values, str) else values:
            if not isinstance(value, str) or not is_hub_id(value):
                raise ValueError(
                    f"{key}={value!r} in the model card is no Hub id (namespace/name); name a path in the text."
                )
    try:
        json.dumps(data, allow_nan=False, default=str)
    except ValueError as error:
        raise ValueError("a number in the model card's metadata is not finite; leave it out.") from error


def card_license(card: str | None) -> str | None:
    """Licence in the metadata of a card, if it has one."""
    match = None if card is None else _FRONT.match(card)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return None
    return data.get("license") if isinstance(data, dict) else None


def assemble_card(front: str, body: str) -> str:
    """A card of metadata and text, with its marks."""
    before, body = f"---\n{front.strip()}\n---\n\n", body.strip() + "\n"
    return f"{before}<!-- raptor_hf:begin {_checksum(body)} {_checksum(before)} -->\n{body}<!-- raptor_hf:end -->\n"


def update_card(existing: str | None, new: str, overwrite: bool = False) -> str:
    """The card to keep: `new`, unless somebody edited the existing one.

    Text added around the marks and edited metadata stay; the part between the marks, and the probe's numbers in the
    metadata, are taken from `new`. A card that was edited between the marks, or has none, stays as it is but for the
    licence, if `new` has one.

    Raises:
        ValueError: if the existing card's metadata are no YAML.
    """
    existing = None if existing is None else unsigned(existing)
    marked = None if existing is None else _MARKED.search(existing)
    if existing is None or overwrite:
        return new
    if marked is None or is_edited(existing):
        return _with_metadata(existing, new, ("license",))
    if _checksum(existing[: marked.start()] + existing[marked.end() :]) == marked[2]:
        return new
    block = _MARKED.search(new)
    if block is None:
        return existing
    inside = f"<!-- raptor_hf:begin {block[1]} {marked[2]} -->\n{block[3]}<!-- raptor_hf:end -->\n"
    return _with_metadata(
        existing[: marked.start()] + inside + existing[marked.end() :], new, ("license", "model-index")
    )


def is_edited(card: str) -> bool:
    """Whether a card was edited between the marks, or has none."""
    marked = _MARKED.search(card)
    return marked is None or _checksum(marked[3]) != marked[1]


def signed(card: str) -> str:
    """A card with its checksum at its end, by which the next push sees whether somebody edited it on the Hub."""
    card = unsigned(card)
    return f"{card.rstrip()}\n\n<!-- raptor_hf:pushed {_checksum(card)} -->\n"


def unsigned(card: str) -> str:
    """A card without the checksum of [`signed`]."""
    return _PUSHED.sub("\n", card)


def is_untouched(card: str) -> bool:
    """Whether a [`signed`] card is as it was pushed."""
    match = _PUSHED.search(card)
    return match is not None and match[1] == _checksum(unsigned(card))


def _with_metadata(card: str, new: str, keys: Sequence[str]) -> str:
    """`card` with some metadata of `new`; results that it has and `new` has not are left out."""
    own, other = _FRONT.match(card), _FRONT.match(new)
    if own is None or other is None:
        return card
    try:
        data, given = yaml.safe_load(own[1]), yaml.safe_load(other[1])
    except yaml.YAMLError as error:
        raise ValueError(f"the model card's metadata are no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict) or not isinstance(given, dict):
        return card
    merged = {**data, **{key: given[key] for key in keys if key in given}}
    if "model-index" in keys and "model-index" not in given:
        merged.pop("model-index", None)
    if merged == data:
        return card
    front = yaml.safe_dump(merged, sort_keys=False, allow_unicode=True).strip()
    return f"---\n{front}\n---\n{card[own.end() :]}"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.replace("\r\n", "\n").strip().encode()).hexdigest()[:12]
