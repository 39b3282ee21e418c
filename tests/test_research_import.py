"""The research code's own numbers: random weights in its names, and the trajectory it computed from them."""

import pathlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from raptor_hf import RaptorModel
from raptor_hf.cli import main
from raptor_hf.data import dinov2_processor
from raptor_hf.research_import import convert_research_state, load_research_blocks, research_config, research_state

DATA = pathlib.Path(__file__).parent / "data"


def oracle(name):
    path = DATA / f"research_raptor3_{name}.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    trajectory = tensors.pop("trajectory")
    state = {key.removeprefix("state."): value for key, value in tensors.items()}
    last_layers = [int(layer) for layer in metadata["thresholds"].split(",")]
    config = research_config(
        state, last_layers, int(metadata["layers"]), int(metadata["heads"]), image_size=28, num_register_tokens=4
    )
    return state, trajectory, config


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_trajectory_of_the_research_code(name, attention):
    state, trajectory, config = oracle(name)
    model = RaptorModel(config).double().eval()
    model.set_attn_implementation(attention)
    load_research_blocks(model, state)
    with torch.no_grad():
        states = model(hidden_states=trajectory[:, 0], output_hidden_states=True).hidden_states
    assert config.mlp_type == name
    assert len(states) == 13
    for layer, own in enumerate(states):
        torch.testing.assert_close(own, trajectory[:, layer], rtol=0, atol=1e-9)
    assert (trajectory[:, 0] - trajectory[:, 12]).abs().max() > 0.1  # a trajectory that stands still proves nothing


def test_teacher_forcing_equals_the_trajectory_layer_by_layer():
    state, trajectory, config = oracle("gelu")
    model = RaptorModel(config).double().eval()
    load_research_blocks(model, state)
    inputs = trajectory[:, 7:10].transpose(0, 1).flatten(0, 1)  # states 7, 8, 9 of two samples in one batch
    with torch.no_grad():
        outputs = model.apply_block(1, inputs, torch.tensor([8, 9, 10]).repeat_interleave(2))
    torch.testing.assert_close(outputs, trajectory[:, 8:11].transpose(0, 1).flatten(0, 1), rtol=0, atol=1e-9)


def test_float32_model_stays_close():
    state, trajectory, config = oracle("swiglu")
    model = RaptorModel(config).eval()
    load_research_blocks(model, state)
    with torch.no_grad():
        last = model(hidden_states=trajectory[:, 0].float(), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(last.double(), trajectory[:, -1], rtol=1e-4, atol=1e-4)


def test_unknown_missing_and_misshapen_weights_are_listed():
    state, _, config = oracle("gelu")
    with pytest.raises(ValueError, match=r"unknown names: blocks\.0\.ls3\.gamma, head\.weight"):
        convert_research_state({**state, "head.weight": torch.ones(1), "blocks.0.ls3.gamma": torch.ones(1)})
    model = RaptorModel(config)
    with pytest.raises(ValueError, match=r"missing \['blocks\.2\.layer_scale1\.scale'\]"):
        load_research_blocks(model, {key: value for key, value in state.items() if key != "blocks.2.ls1.gamma"})
    with pytest.raises(ValueError, match=r"too many \['blocks\.3\.norm1\.bias'\]"):
        load_research_blocks(model, {**state, "blocks.3.norm1.bias": torch.ones(32)})
    with pytest.raises(ValueError, match=r"norm1\.bias \(7,\) for \(32,\)"):
        load_research_blocks(model, {**state, "blocks.1.norm1.bias": torch.ones(7)})


@pytest.mark.parametrize("last_layers", [(10, 7), (0, 7), (7, 12)])
def test_last_layers_must_increase(last_layers):
    state, _, _ = oracle("gelu")
    with pytest.raises(ValueError, match=r"must increase and lie within 1\.\.11"):
        research_config(state, last_layers, 12, 4)


# ---- the command ----


class Pickled(torch.nn.Module):
    """Stands for the research code's module, which is pickled as a whole."""

    def __init__(self, state):
        super().__init__()
        self.blocks = torch.nn.ModuleDict()
        self._state = state

    def state_dict(self):
        return self._state


@pytest.fixture
def teacher(make_teacher, tmp_path):
    made = make_teacher(num_hidden_layers=12, num_attention_heads=4, image_size=28)
    made.model.save_pretrained(tmp_path / "teacher")
    dinov2_processor(28).save_pretrained(tmp_path / "teacher")
    return made


@pytest.mark.parametrize("kind", ["state", "wrapped", "pickle"])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_the_command_makes_a_folder_with_the_teachers_embeddings(kind, name, teacher, tmp_path, capsys):
    state, trajectory, _ = oracle(name)
    contents = {
        "state": state,
        "wrapped": {"step": 3, "state_dict": {f"module._orig_mod.{key}": value for key, value in state.items()}},
        "pickle": Pickled(state),
    }[kind]
    torch.save(contents, tmp_path / "raptor.pt")
    command = ["import-research", str(tmp_path / "raptor.pt"), str(tmp_path / "out"), "--teacher"]
    command.append(str(tmp_path / "teacher"))
    if kind == "pickle":
        assert main(command) == 2
        assert "if you trust it, give --allow-pickle" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        command.append("--allow-pickle")
    assert main(command) == 0, capsys.readouterr().err
    assert ("can run any code" in capsys.readouterr().err) == (kind == "pickle")
    model = RaptorModel.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert model.config.block_schedule == [0] * 7 + [1] * 3 + [2] * 2
    assert model.config.layer_norm_eps == 1e-5
    assert (model.config.mlp_type, model.config.teacher_name_or_path) == (name, "teacher")
    with torch.no_grad():
        last = model(hidden_states=trajectory[:, 0], output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(last, trajectory[:, 12], rtol=1e-5, atol=1e-5)  # saved in float32
    embeddings = teacher.embedding_state()
    assert all(torch.equal(model.state_dict()[key].float(), value) for key, value in embeddings.items())
    assert "Not yet run." in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


def test_what_cannot_be_imported_is_said(teacher, make_teacher, tmp_path, capsys):
    state, _, _ = oracle("gelu")
    torch.save(state, tmp_path / "raptor.pt")
    torch.save({**state, "head.weight": torch.ones(1)}, tmp_path / "more.pt")
    torch.save({"head.weight": torch.ones(1)}, tmp_path / "none.pt")
    (tmp_path / "torn.safetensors").write_bytes(b"1234567890")
    make_teacher(num_hidden_layers=4, image_size=28).model.save_pretrained(tmp_path / "short")
    make_teacher(num_hidden_layers=12, hidden_size=64, image_size=28).model.save_pretrained(tmp_path / "wide")
    for file, name, options, message in (
        ("raptor.pt", "short", [], "no published split of 4 layers into 3 blocks; give --last-layers"),
        ("raptor.pt", "teacher", ["--last-layers", "10,7"], "must increase and lie within 1..11"),
        ("raptor.pt", "wide", [], "the checkpoint has 32 features, the teacher 64"),
        ("more.pt", "teacher", [], "unknown names: head.weight"),
        ("none.pt", "teacher", [], "has no weights called blocks.N.*"),
        ("torn.safetensors", "teacher", [], "is damaged"),
        ("absent.pt", "teacher", [], "is no file"),
    ):
        folder = str(tmp_path / name)
        assert (
            main(["import-research", str(tmp_path / file), str(tmp_path / "out"), "--teacher", folder, *options]) == 2
        )
        assert message in capsys.readouterr().err
    assert main(["import-research", str(tmp_path / "raptor.pt")]) == 2
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="has no weights called blocks"):
        research_state(None)
