"""What leaves the trainer: checkpoints with the wrapper, models without it, and a card of what was measured.

Pushing is tested with the real client in `test_hub.py`.
"""

from transformers import AutoImageProcessor

from raptor_hf import RaptorModel


def assert_same(one, other):
    own, expected = one.state_dict(), other.state_dict()
    assert own.keys() == expected.keys()
    assert [name for name in own if not own[name].equal(expected[name])] == []


def test_checkpoints_hold_the_wrapper_and_models_the_student(make_trainer, tmp_path):
    trainer = make_trainer(stage="end_to_end")
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    files = {path.name for path in (tmp_path / "model").iterdir() if path.suffix != ".py"}
    assert files == {"config.json", "model.safetensors", "preprocessor_config.json"}
    model, report = RaptorModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same(model, trainer.raptor)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert_same(RaptorModel.from_pretrained(checkpoint), trainer.raptor)
    for folder in (checkpoint, tmp_path / "model"):
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        assert dict(processor.crop_size) == {"height": 28, "width": 28}


def test_the_card_says_what_this_run_measured(make_trainer, tmp_path):
    trainer = make_trainer(stage="end_to_end", hub_model_id="org/mine")
    trainer.train()
    trainer.create_model_card(license="mit")
    before = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "# mine\n" in before
    assert "license: mit" in before
    assert "| steps | 4 |" in before
    assert before.count("Not yet run.") == 2  # neither fidelity nor probe
    trainer.evaluate()
    trainer.create_model_card(model_name="other")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    r2 = trainer.fidelity.r2["all"]
    assert f"| all | {sum(r2) / 4:.3f} | {r2[0]:.3f} | {r2[-1]:.3f} |" in card
    assert "# other\n" in card
    assert "license: mit" in card
    assert str(tmp_path) not in card
    assert_same(RaptorModel.from_pretrained(tmp_path / "run" / "model"), trainer.raptor)
