"""Rows of the studies as text."""

from raptor_hf import plots
from raptor_hf.study_report import (
    COMPLEXITY_HEADER,
    FLOW_HEADER,
    PARADIGMS_HEADER,
    PHASES_HEADER,
    RECURRENCE_HEADER,
    SWAPS_HEADER,
    complexity_rows,
    complexity_section,
    dynamics_section,
    flow_rows,
    paradigm_rows,
    paradigms_section,
    phases_rows,
    recurrence_rows,
    recurrence_section,
    similarities_blocks,
    studies_section,
    swap_rows,
)


def test_a_flow_comes_down_to_a_row_per_token_group():
    entry = {
        "angular_speed": {"mean": [0.1, 0.5, 0.3], "quantiles": {}}, "coherence": [0.2, 0.1, 0.9],
        "effective_rank": [9.04, 3.0, 2.96], "dmd": {"median_modulus": 0.5, "spectral_radius": 1.25},
    }  # fmt: skip
    rows = flow_rows({"a": {"groups": {"cls": entry, "patch": {**entry, "effective_rank": None}}}})
    assert rows[0] == ["a", "cls", "0.300", "2", "9.0 to 3.0", "3", "0.500", "1.250"]
    assert rows[1][4] == "–"
    assert {len(row) for row in rows} == {len(FLOW_HEADER)}


def test_swaps_come_down_to_a_row_per_scope_and_number():
    summary = {"scope": "intra", "num_swapped": 2, "num_swaps": 5, "cosine": {"all": {"mean": 0.5, "std": None}}}
    record = {"num_possible": {"intra": {"2": 7}}, "base_accuracy": 0.8}
    with_head = {**record, "summary": [{**summary, "accuracy": {"mean": 0.4, "std": 0.1}}]}
    without = {**record, "base_accuracy": None, "summary": [{**summary, "accuracy": None}]}
    rows = swap_rows({"a": with_head, "b": without})
    assert rows[0] == ["a", "intra", "2", "5 of 7", "0.5000", "–", "40.00", "10.00", "0.500"]
    assert rows[1][-3:] == ["–"] * 3
    assert {len(row) for row in rows} == {len(SWAPS_HEADER)}


def test_results_without_studies_have_no_such_section():
    for section in (dynamics_section, studies_section, paradigms_section, recurrence_section, complexity_section):
        assert section({"studies": {}}) == []


def test_phases_of_several_models_are_a_picture_and_a_table():
    matrix = [[1.0, 0.5], [0.5, 1.0]]
    found = {"block_schedule": [0, 1], "repeats": [1, 1], "score": 0.12345, "method": "dp"}
    vit = {"model_type": "vit", "groups": {"all": matrix, "cls": matrix, "patch": matrix}, "partitions": {"2": found}}
    jepa = {"model_type": "ijepa", "groups": {"all": matrix, "patch": matrix}, "partitions": {}}
    assert phases_rows({"a": vit, "b": jepa}) == [["a", "vit", "cls, patch", "2", "1 | 2", "0.123"]]
    assert len(PHASES_HEADER) == 6
    picture, listing = similarities_blocks({"phases_of": {"a": vit, "b": jepa}})
    assert "squares: its phases, k = 2" in str(picture)
    assert "cls, patch" in str(listing)
    (picture,) = similarities_blocks({"teacher": {"name": "a"}, "phases": vit})  # whose table is there already
    assert "Similarity of layers by token group" in str(picture)
    assert similarities_blocks({"phases": {"similarity": matrix, "partitions": {}}}) == []  # a run before 0.1


def test_recurrence_comes_down_to_a_row_per_phase_and_token_group():
    walk = {"ends": {"cls": {"fixed": 0.25, "cycle": 0.5, "none": 0.25}}, "speed": {"cls": [0.3, 0.01]}}
    walk["agreement"] = {"cls": [0.5, 0.6, 0.7]}
    methods = dict.fromkeys(("step", "endpoint", "identity"))
    maps = {
        "state": {method: {"cls": {"cosine": 0.1 * n}} for n, method in enumerate(methods, start=1)},
        "final": {method: {"cosine": {"cls": 0.1 * n}} for n, method in enumerate(methods, start=4)},
    }
    record = {"phases": [2, 1], "iterations": [{**walk, "phase": 0}, {**walk, "phase": 1}]}
    rows = recurrence_rows({"a": {**record, "spans": {"phases": [maps, maps]}}, "b": {**record, "spans": None}})
    expected = [
        "a",
        "1-2",
        "cls",
        "0.25",
        "0.50",
        "0.010",
        "0.700",
        "0.100",
        "0.200",
        "0.300",
        "0.400",
        "0.500",
        "0.600",
    ]
    assert rows[0] == expected
    assert rows[3][:3] == ["b", "3", "cls"]
    assert rows[3][-6:] == ["–"] * 6
    assert {len(row) for row in rows} == {len(RECURRENCE_HEADER)}


def test_complexity_comes_down_to_a_row_per_model_and_precision():
    length = {"num_blocks": 3, "num_parameters": 1234, "block_bits": 2e6, "coded_bits": 1e6, "schedule_bits": 15}
    length["log2_flops"] = 31.5
    own = {"lengths": {"bfloat16": {**length, "coded_bits": 4e6}}}
    error = {"max_epsilon": 2.5, "relative": [0.1, 0.25, None]}
    model = {"lengths": {"bfloat16": length}, "error": error, "runtime": {"median": 1.02}}
    rows = complexity_rows({"teacher": own, "models": {"k3": model, "bare": {**model, "runtime": None}}}, "vit")
    assert rows[0][:2] == ["vit", "bfloat16"]
    assert rows[0][-3:] == ["–"] * 3
    assert rows[1] == ["k3", "bfloat16", "3", "1,234", "2.0", "1.0", "0.250", "15", "31.500", "1.020", "2.50", "0.250"]
    assert rows[2][-3] == "–"
    assert {len(row) for row in rows} == {len(COMPLEXITY_HEADER)}


def test_paradigms_come_down_to_a_row_each_and_a_curve_each(monkeypatch):
    run = {"stage": "blocks", "accuracy": 0.4, "r2": 0.5, "r2_last": 0.25, "r2_layers": [0.75, 0.25]}
    other = {**run, "accuracy": 0.6, "r2": 0.7, "r2_layers": [None, 0.75]}
    runs = [{**run, "paradigm": "hybrid"}, {**other, "paradigm": "hybrid"}, {**run, "paradigm": "terminal"}]
    record = {"runs": runs, "base_accuracy": 0.8, "phases": [1, 1]}
    rows = paradigm_rows(record)
    assert rows[0] == ["hybrid", "blocks", "2", "50.00", "14.14", "0.625", "0.600", "0.141", "0.250"]
    assert rows[1][4] == rows[1][7] == "–"
    assert {len(row) for row in rows} == {len(PARADIGMS_HEADER)}
    drawn = []
    draw = plots.layer_curves_figure
    monkeypatch.setattr(plots, "layer_curves_figure", lambda *args, **more: drawn.append(args) or draw(*args, **more))
    assert [block["kind"] for block in paradigms_section({"studies": {"paradigms": record}})] == ["figure", "table"]
    assert drawn[0][0] == {"hybrid": [0.75, 0.5], "terminal": [0.75, 0.25]}
