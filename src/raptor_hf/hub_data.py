"""Datasets of the Hub, and what to do when one does not load."""

from typing import Any


def load_hub_dataset(name: str, **options: Any) -> Any:
    """`datasets.load_dataset(name, **options)`.

    Raises:
        ValueError: if it does not load: says why, and how to get at a gated dataset.
    """
    import datasets

    try:
        return datasets.load_dataset(name, **options)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{name!r} is no folder here and did not load from the Hub ({reason}); check id and split, of a gated "
            f"dataset accept the terms on https://huggingface.co/datasets/{name} and run `hf auth login`, or pass a "
            "folder of images."
        ) from error
