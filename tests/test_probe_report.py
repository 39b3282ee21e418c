"""The report's section on probes: Table 1 and Fig. 7 hold the numbers of the results, and stay away without them."""

import pytest

from raptor_hf.probe_report import accuracy_section
from sample_results import make_results


@pytest.fixture
def results():
    results = make_results()
    results["models"][0]["fidelity"]["r2"]["all"] = [1.0, 0.9, 0.8, 0.7]
    third = {**results["models"][0], "name": "raptor-k3", "num_blocks": 3}
    results["models"] = [results["models"][0], third]
    return results


def kinds(blocks):
    return [block.get("name") or block["caption"] for block in blocks]


def test_one_probe_of_old_results_has_no_table(results):
    results["models"] = results["models"][:1]
    assert kinds(accuracy_section(results)) == ["accuracy", "Top-1 of each run (%)", "Protocol of the probe"]


def test_several_numbers_of_blocks_are_drawn(results, monkeypatch):
    drawn = {}

    def blocks_figure(panels, references, **kwargs):
        drawn.update(panels=panels, references=references)
        return original(panels, references, **kwargs)

    from raptor_hf import plots

    original = plots.blocks_figure
    monkeypatch.setattr(plots, "blocks_figure", blocks_figure)
    results["probe"]["results"]["raptor-k3"] = {"accuracy": [0.9], "mean": 0.9}
    assert kinds(accuracy_section(results))[0] == "blocks"
    assert drawn["panels"]["retained (%)"] == {"Top-1": {2: 97.8, 3: pytest.approx(100 * 0.9 / 0.91)}}
    curves = drawn["panels"]["R² with the teacher"]
    assert curves["R², mean of the layers"] == {2: pytest.approx(0.85), 3: pytest.approx(0.85)}
    assert curves["R², last layer"] == {2: 0.7, 3: 0.7}
    assert drawn["references"] == {"retained (%)": {"ViT-S: Top-1": pytest.approx(100 * 0.5 / 0.91)}}


def test_several_probes_stand_in_one_table_and_apart(results):
    probe = {**results.pop("probe"), "dataset": "photos"}
    depth = {
        "task": "depth-estimation",
        "dataset": "rooms",
        "metric": "rmse",
        "results": {"ViT-S": {"rmse": [1.0], "mean": 1.0}},
    }
    results["probes"] = [probe, depth]
    results["models"] = []
    table, *others = accuracy_section(results)
    assert table["header"] == ["Model", "Blocks", "Parameters", "photos Top-1 (%)", "Retained", "rooms RMSE (m)"]
    assert kinds(others) == [
        "accuracy", "Top-1 of each run on photos (%)", "Protocol of the probe on photos",
        "RMSE of each run on rooms (m)",
    ]  # fmt: skip
