"""Two processes give what one gives: gradients, metrics, optimiser steps, resumed runs, and how a run ends."""

import itertools
import socket

import pytest
import torch

import process_cases
from raptor_hf import RaptorModel

GRADIENTS = ["blocks", "end_to_end", "checkpointing", "blocks_checkpointing", "evaluated_first", "one_block"]


@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def in_two(folder_of_two):
    """What every case returned, by process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return process_cases.run_in_two(folder_of_two, port)


@pytest.fixture
def in_one(tmp_path):
    """Runs a case in this process."""
    return lambda case: process_cases.CASES[case](tmp_path / case, 1)


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_are_those_of_the_joined_batch(case, in_two, in_one):
    first, second = (result[case] for result in in_two)
    assert all(torch.equal(first[name], second[name]) for name in first)
    alone = in_one(case)
    assert largest_difference(first, alone) <= 1e-6
    assert max(value.abs().max() for value in alone.values()) > 1e-3  # there is something to compare


def test_only_the_chosen_block_has_gradients(in_two):
    names = {name.split(".", 1)[1] for name in in_two[0]["one_block"]}
    assert all(name.startswith("raptor.blocks.1.") for name in names)


def test_every_image_is_measured_once(in_two, in_one):
    alone = in_one("evaluation")
    for result in in_two:
        measured = result["evaluation"]
        assert measured["num_images"] == alone["num_images"] == 5
        for name in alone.keys() - {"num_images", "features"}:
            assert measured[name] == pytest.approx(alone[name], abs=1e-6), name
        torch.testing.assert_close(measured["features"], alone["features"], rtol=1e-5, atol=1e-6)


def test_muon_takes_the_same_steps(in_two, in_one):
    first, second = (result["muon"] for result in in_two)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert largest_difference(first, in_one("muon")) <= 1e-4  # orthogonalisation is computed in bfloat16


def test_a_resumed_run_is_bit_equal(in_two):
    for result in in_two:
        weights = result["resume"]
        names = [name.removeprefix("straight.") for name in weights if name.startswith("straight.")]
        assert all(torch.equal(weights[f"straight.{name}"], weights[f"resumed.{name}"]) for name in names)


def test_each_process_draws_its_own_noise(in_two):
    assert in_two[0]["noise"]["seed"] != in_two[1]["noise"]["seed"]


def test_states_are_written_once_and_shared(in_two, in_one):
    first, second = (result["cache"] for result in in_two)
    alone = in_one("cache")
    assert (first["written"], second["written"], alone["written"]) == (6, 5, 11)  # batches: 3 shards each
    assert torch.equal(first["states"], second["states"])
    assert torch.equal(first["states"], alone["states"])
    assert largest_difference(first["gradients"], alone["gradients"]) <= 1e-6
    assert max(value.abs().max() for value in alone["gradients"].values()) > 1e-3


def test_a_loss_that_is_no_number_stops_all_processes(in_two):
    for result in in_two:
        assert "not a finite number" in result["broken_image"]["message"]


def test_fewer_images_than_processes_are_named(in_two):
    for result in in_two:
        assert "1 training images are fewer than one batch of 8" in result["one_image"]["message"]


def test_sharded_blocks_train_and_the_whole_student_is_saved(in_two, in_one, folder_of_two):
    first = in_two[0]["sharded"]
    assert largest_difference(first, in_one("sharded")) <= 1e-6
    reloaded = RaptorModel.from_pretrained(folder_of_two / "sharded" / "student").state_dict()
    assert all(torch.equal(reloaded[name], first[name]) for name in reloaded)


PROBES = ["classification", "cached", "streamed", "segmentation", "masks_cached", "depth"]


@pytest.mark.parametrize("case", ["probes", "probes_one_image"])
def test_probes_find_what_one_process_finds(case, in_two, in_one):
    """Also of a last batch that does not divide, and of fewer images than processes."""
    alone, count = in_one(case), 1 if case == "probes_one_image" else 5
    assert list(alone) == PROBES
    for result, (name, expected) in itertools.product(in_two, alone.items()):
        found = result[case][name]
        assert found["values"]["num_scored"] == expected["values"]["num_scored"] == count
        assert flat(found["values"]) == pytest.approx(flat(expected["values"]), abs=1e-6, nan_ok=True), name
        assert largest_difference(found["weights"], expected["weights"]) <= 1e-6
        assert found["seen"] <= (0.7 if count > 1 else 1) * expected["seen"]  # the images are shared
    assert in_two[0][case].keys() == alone.keys()


def test_a_probe_command_is_finished_once(in_two, in_one):
    alone = in_one("probe_command")
    for result in in_two:
        assert result["probe_command"]["codes"] == alone["codes"] == [0, 2, 0]  # a finished run is not overwritten
    assert flat(in_two[0]["probe_command"]["probe"]) == pytest.approx(flat(alone["probe"]), abs=1e-6)


def flat(values, name=""):
    """Numbers of nested dictionaries and lists under dotted names."""
    if isinstance(values, dict | list):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        return {key: number for part, value in items for key, number in flat(value, f"{name}.{part}").items()}
    return {name: values} if isinstance(values, int | float) else {}
