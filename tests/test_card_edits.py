"""What of a card is generated and what is somebody's own, and the rules of its metadata, on cards of a few lines."""

import pytest

from raptor_hf.card_edits import (
    assemble_card,
    card_license,
    check_card,
    is_edited,
    is_hub_id,
    is_untouched,
    signed,
    unsigned,
    update_card,
)

INDEX = "model-index:\n- results:\n  - metrics:\n    - value: {}\n"


def card(text="Text.", value=None, front=""):
    return assemble_card("tags:\n- raptor\n" + front + ("" if value is None else INDEX.format(value)), text)


def test_hub_ids(tmp_path, monkeypatch):
    assert is_hub_id("org/name")
    assert is_hub_id("org/name.v1_2")
    assert not any(map(is_hub_id, ("name", "./a/b", "a/b/c", "/a/b", "", None, ".a/b", "a/.b")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_id("org/name")  # a folder here


@pytest.mark.parametrize(
    ("front", "message"),
    [
        ("license: My Own!", "license='My Own!' in the model card is no identifier"),
        ("license: [mit]", r"license=\['mit'\] in the model card is no identifier"),
        ("base_model: ./dino", r"base_model='\./dino' in the model card is no Hub id"),
        ("datasets:\n- ../ade", r"datasets='\.\./ade' in the model card is no Hub id"),
        ("a: [", "metadata are no YAML"),
        ("just text", "has no metadata"),
        (INDEX.format(".nan"), "is not finite"),
        (INDEX.format("-.inf"), "is not finite"),
    ],
)
def test_bad_metadata_are_refused(front, message):
    with pytest.raises(ValueError, match=message):
        check_card(f"---\n{front}\n---\n\ntext\n")


@pytest.mark.parametrize("license", ["apache-2.0", "openrail++", "cc-by-nc-4.0", "other"])
def test_good_metadata_pass(license):
    text = f"---\nlicense: {license}\nbase_model: org/name\ndatasets: [a/b, c/d]\n{INDEX.format(0.5)}---\n\ntext\n"
    check_card(text)
    assert card_license(text) == license


def test_a_card_without_metadata():
    with pytest.raises(ValueError, match="has no metadata"):
        check_card("# A card\n")
    assert card_license("# A card\n") is None
    assert card_license("---\na: [\n---\n") is None
    assert card_license(None) is None


def test_a_generated_card_is_replaced():
    assert update_card(None, "new") == "new"
    assert update_card(card("Old.", 0.1), card("New.", 0.2)) == card("New.", 0.2)
    assert not is_edited(card())


def test_what_stands_around_the_marks_is_kept():
    edited = card("Old.", 0.1).replace("tags:\n", "tags:\n- mine\n") + "\nA note.\n"
    updated = update_card(edited, card("New.", 0.2, "license: mit\n"))
    assert "Old." not in updated
    for kept in ("New.", "A note.", "- mine", "value: 0.2", "license: mit"):
        assert kept in updated
    again = update_card(updated, card("Newer."))
    assert "A note." in again
    assert "value:" not in again  # a number that the text has no longer
    assert "license: mit" in again
    assert update_card(edited, card("New."), overwrite=True) == card("New.")


@pytest.mark.parametrize(
    "edit", [lambda text: text.replace("Old.", "Mine."), lambda text: "---\na: 1\n---\n\n# Mine\n"]
)
def test_what_was_edited_between_the_marks_is_all_theirs_but_for_the_licence(edit):
    theirs = edit(card("Old.", 0.1))
    assert is_edited(theirs)
    assert update_card(theirs, card("New.", 0.2)) == theirs
    licensed = update_card(theirs, card("New.", 0.2, "license: mit\n"))
    assert card_license(licensed) == "mit"
    assert licensed.split("---\n")[2] == theirs.split("---\n")[2]


def test_a_pushed_card_knows_whether_it_was_edited_since():
    pushed = signed(card())
    assert is_untouched(pushed)
    assert signed(pushed) == pushed
    assert is_untouched(signed("# Mine\n"))
    assert unsigned(pushed).strip() == card().strip()
    assert not is_untouched(card())
    assert not is_untouched(pushed.replace("Text.", "Other."))
    assert not is_untouched(pushed + "More.\n")
    assert update_card(pushed, card("New.")) == card("New.")


def test_metadata_that_are_no_yaml_are_refused():
    with pytest.raises(ValueError, match="the model card's metadata are no YAML"):
        update_card(card().replace("tags:", "note: a: b\ntags:"), card("New."))
