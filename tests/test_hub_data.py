"""Datasets of the Hub that do not load."""

import datasets
import pytest

from raptor_hf.data import load_images
from raptor_hf.dense_data import load_depth, load_segmentation
from raptor_hf.hub_data import load_hub_dataset
from raptor_hf.streams import load_stream


@pytest.mark.parametrize("load", [load_hub_dataset, load_images, load_stream, load_segmentation, load_depth])
def test_a_gated_dataset_says_how_to_log_in(load, monkeypatch):
    def refuse(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'org/set' is a gated dataset on the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        ValueError, match=r"is a gated dataset on the Hub.*huggingface.co/datasets/org/set.*hf auth login"
    ):
        load("org/set")


def test_what_loads_is_given_on(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: (args, kwargs))
    assert load_hub_dataset("org/set", split="train") == (("org/set",), {"split": "train"})
