"""Tables and figures of the report."""

import base64

from matplotlib.figure import Figure

from raptor_hf.report_blocks import figure_block, table_block


def test_columns_of_numbers_are_flush_right():
    rows = [["a", "1.5", "7 %", "x"], ["b", "–", "0.3 ± 0.1", "2"]]
    assert table_block("numbers", rows)["classes"] == ["name", "number", "number", "text"]
    assert table_block("numbers", rows, ["", "", "", ""])["classes"][3] == "nowrap"


def test_a_figure_is_drawn_once_and_carried_twice():
    block = figure_block("curve", Figure(figsize=(4, 3)), "a curve")
    assert (block["name"], block["caption"], block["width"]) == ("curve", "a curve", 400)
    assert block["png"].startswith(b"\x89PNG")
    assert base64.b64decode(block["base64"]) == block["png"]
