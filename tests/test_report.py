"""Results as a page: what goes in comes out, and nothing else."""

import base64
from html.parser import HTMLParser

import pytest
from PIL import Image

from raptor_hf import report
from raptor_hf.report import write_report
from raptor_hf.results import read_json, summary_rows, write_json
from sample_results import make_results, raptor

VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """Text, tags with their attributes, cells by row, and whether every tag is closed."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.rows, self.text = [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        self.text += data

    def attributes(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def sections(self):
        return [attributes["id"] for attributes in self.attributes("section")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of everything, written once."""
    path = tmp_path_factory.mktemp("run")
    write_report(path, make_results())
    return path


@pytest.fixture(scope="module")
def page(folder):
    return Page(folder / "report.html")


def test_page_is_well_formed_and_loads_nothing(page, folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    names = {name for name, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "svg"}
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.attributes("meta")
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.attributes("img"))
    assert all(image["alt"] for image in page.attributes("img"))
    assert "url(" not in text
    assert "@import" not in text
    loading = [value for name, attributes in page.tags for value in attributes.values() if name != "a"]
    assert not [value for value in loading if value and "http" in value]
    anchors = {link["href"][1:] for link in page.attributes("a") if link["href"].startswith("#")}
    assert anchors == set(page.sections)


def test_page_has_every_section_and_figure(page, folder):
    assert page.sections == [
        "results", "phases", "fidelity", "accuracy", "training", "environment", "load-the-model", "data",
    ]  # fmt: skip
    names = ["schedule", "similarity", "r2", "r2_groups", "cosine", "accuracy", "training_1", "training_2"]
    assert sorted(file.name for file in (folder / "figures").iterdir()) == sorted(f"{name}.png" for name in names)
    for name, image in zip(names, page.attributes("img"), strict=True):
        content = (folder / "figures" / f"{name}.png").read_bytes()
        assert base64.b64decode(image["src"].partition(",")[2]) == content
        with Image.open(folder / "figures" / f"{name}.png") as picture:
            assert picture.width == int(1.5 * int(image["width"]))


def test_page_shows_what_the_results_hold(page):
    _, rows = summary_rows(make_results())
    rows[0][0] = "digits-vit (teacher)"
    expected = [
        *rows,
        ["2", "1-2 | 3-4", "3.25", "dp"],
        ["3", "1 (block 0) | 2 (block 1) | 3 (block 0) | 4 (block 2)", "–", "given"],
        ["teacher", "90.00", "92.00"], ["ViT-S", "50.00", "–"],
        ["epochs", "20"], ["augment", "false"],
        ["Setting", "raptor-k2", "<b>&"], ["steps", "40", "40"], ["seconds", "12.5", "12.5"], ["seeds", "0, 1", "0, 1"],
        ["student", "init: middle", "init: middle"],
        ["seed", "7"], ["python", "3.11.9"], ["accelerator", "–"], ["teacher", "41.25"],
        ["name", "digits"], ["num_train", "1437"], ["num_test", "360"], ["num_skipped", "3"],
    ]  # fmt: skip
    assert [row for row in expected if row not in page.rows] == []
    assert "tokens: cls, mean over 1,437 images" in page.text
    assert "R² (variance_weighted) with the teacher by layer, all tokens, measured on 1,797 images" in page.text
    assert 'RaptorModel.from_pretrained("raptor-k2/model")  # raptor-k2' in page.text


def test_names_are_text_not_markup(page, folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;" in text
    assert page.text.startswith("\n\n\nDigits & <friends>\n")


def test_no_absolute_path_is_shown(page, folder):
    assert "raptor-hf quickstart --output-dir digits --seed 7" in page.text
    assert "somebody" not in page.text
    assert str(folder) not in page.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("facebook/dinov2-base", "facebook/dinov2-base"),
        ("~/data/flowers", "flowers"),
        (r"C:\Users\me\flowers", "flowers"),
        ("--data=/mnt/a/b '/mnt/c/d e'", "--data=b 'd e'"),
        ("https://host/a/b", "https://host/a/b"),
        ("'/home/a person/My Photos/x'", "'x'"),
        ("file:///home/me/x, (/home/me/y)", "x, (y)"),
        ("../run/model", "../run/model"),  # where the page names a model from
        ("m / s", "m / s"),
        ("{folder}/k2/model", "k2/model"),
    ],
)
def test_folders_of_absolute_paths_are_left_out(text, shown, tmp_path):
    path = write_report(tmp_path, {"format": 1, "command": text.format(folder=tmp_path)})
    assert f"<code>{shown}</code>".replace("'", "&#39;") in path.read_text(encoding="utf-8")


def test_report_of_nothing_has_no_sections(tmp_path):
    page = Page(write_report(tmp_path / "new", {"format": 1}))
    assert page.sections == []
    assert page.rows == []
    assert "Raptor report" in page.text
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("part", "sections"),
    [
        ({"seed": 0}, ["environment"]),
        ({"timings": {"a": 1.0}}, ["environment"]),
        ({"dataset": {"name": "digits"}}, ["data"]),
        ({"teacher": {"name": "vit"}}, ["results"]),
        ({"phases": {"partitions": {"1": {"block_schedule": [0, 0]}}}}, ["phases"]),
        ({"models": [{"name": "a", "path": "model"}]}, ["results", "load-the-model"]),
        ({"models": [{"name": "a", "fidelity": {"r2": {"all": [None]}}}]}, ["results"]),
        ({"models": [{"name": "a", "training": {"history": [{"epoch": 1.0}]}}]}, ["results"]),
        ({"models": [{"name": "a", "training": {"steps": 3}}]}, ["results", "training"]),
        ({"probe": {"results": {"a": {"mean": None}}}}, ["results"]),
        ({"probe": None, "models": [], "phases": {}, "environment": {}, "command": ""}, []),
    ],
)
def test_sections_without_data_are_absent(part, sections, tmp_path):
    page = Page(write_report(tmp_path, {"format": 1, **part}))
    assert page.sections == sections
    assert not page.attributes("img")


def test_phase_boundaries_are_drawn_where_all_models_share_them(tmp_path, monkeypatch):
    seen = []
    original = report.plots.layer_curves_figure
    monkeypatch.setattr(
        report.plots, "layer_curves_figure", lambda *args, **kw: seen.append(kw["boundaries"]) or original(*args, **kw)
    )
    fidelity = {"fidelity": {"r2": {"all": [0.5] * 4}}, "training": None}
    one, other = raptor("a", [0, 0, 1, 1], 0.5, **fidelity), raptor("b", [0, 0, 0, 1], 0.5, **fidelity)
    write_report(tmp_path, {"format": 1, "models": [one]})
    write_report(tmp_path, {"format": 1, "models": [one, other]})
    assert seen == [[2], []]


def test_report_is_the_same_from_memory_and_from_file_and_every_time(folder, tmp_path):
    path = write_report(tmp_path, read_json(write_json(tmp_path / "results.json", make_results())))
    assert path == tmp_path / "report.html"
    assert path.read_bytes() == (folder / "report.html").read_bytes()


@pytest.mark.parametrize("results", [{}, {"format": 2}])
def test_unknown_formats_are_refused(results, tmp_path):
    with pytest.raises(ValueError, match=r"results have format (None|2), not 1; run the command again"):
        write_report(tmp_path, results)
    assert list(tmp_path.iterdir()) == []


def test_models_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"models \['a', 'a'\] do not all have their own name; rename one of a pair"):
        write_report(tmp_path, {"format": 1, "models": [{"name": "a"}, {"name": "a"}]})
