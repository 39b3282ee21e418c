"""Exported files: the same outputs at every size, weight-tied matrices once, clear errors."""

import json
import sys

import onnx
import onnxruntime
import pytest
import torch

from raptor_hf import (
    RaptorBackbone,
    RaptorForDepthEstimation,
    RaptorForImageClassification,
    RaptorForSemanticSegmentation,
    RaptorModel,
    export,
)
from raptor_hf.cli import main
from raptor_hf.export import export_model
from raptor_hf.vit_training import digits_processor

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporters


@pytest.fixture
def model(make_model):
    """Six applications of two blocks, native grid of 4 x 4 patches."""
    return make_model(block_schedule=[0, 0, 0, 0, 1, 1])


def test_onnx_is_free_in_size_and_has_each_matrix_once(model, tmp_path, pixels):
    path, difference = export_model(model, tmp_path, "onnx", pixel_values=pixels)
    assert difference < 1e-5
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == ["last_hidden_state", "pooler_output"]
    for shape in ((1, 3, 56, 56), (4, 3, 14, 14), (2, 3, 70, 42)):
        images = torch.randn(shape)
        with torch.no_grad():
            expected = model(images)
        last, pooled = session.run(None, {"pixel_values": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(last), expected.last_hidden_state, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.from_numpy(pooled), expected.pooler_output, rtol=1e-4, atol=1e-4)
    sizes = [torch.Size(tensor.dims).numel() for tensor in onnx.load(path).graph.initializer]
    matrices = {
        name: value.numel() for name, value in model.state_dict().items() if "mlp.fc" in name and value.ndim == 2
    }
    assert sizes.count(next(iter(matrices.values()))) == len(matrices)
    assert sum(sizes) < 1.2 * model.num_parameters()


@pytest.mark.parametrize("fields", [{"num_register_tokens": 0, "interpolate_antialias": False}, {"mlp_type": "swiglu"}])
def test_torch_export_is_the_model_bit_for_bit(fields, make_model, tmp_path, pixels):
    model = make_model(**fields)
    path, difference = export_model(model, tmp_path, "torch-export", pixel_values=pixels)
    assert difference == 0
    program = torch.export.load(path)
    assert len(program.state_dict) == len(model.state_dict())
    images = torch.randn(5, 3, 28, 84)
    with torch.no_grad():
        assert torch.equal(program.module()(images)[0], model(images).last_hidden_state)


def test_a_classifier_gives_logits(make_model, tmp_path):
    model = make_model(RaptorForImageClassification, num_labels=3).bfloat16()
    path, _ = export_model(model, tmp_path, "torch-export")
    images = torch.randn(2, 3, 56, 56)
    with torch.no_grad():
        (logits,) = torch.export.load(path).module()(images)
        torch.testing.assert_close(logits, model.float()(images).logits)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("head", [RaptorForSemanticSegmentation, RaptorForDepthEstimation])
def test_dense_heads_are_exported(head, make_model, tmp_path):
    model = make_model(head, num_labels=3, num_depth_bins=8)
    path, difference = export_model(model, tmp_path, "torch-export")
    assert difference < 1e-5
    images = torch.randn(2, 3, 28, 70)
    with torch.no_grad():
        (output,) = torch.export.load(path).module()(images)
        torch.testing.assert_close(output, model(images)[0], rtol=1e-4, atol=1e-4)


def test_safetensors_by_command_in_bfloat16(make_model, tmp_path):
    folder, out = tmp_path / "raptor", tmp_path / "half"
    make_model(image_size=16, patch_size=4).save_pretrained(folder)
    digits_processor().save_pretrained(folder)
    command = ["export", str(folder), "--format", "safetensors", "--dtype", "bfloat16"]
    assert main([*command, "--output-dir", str(out)]) == 0
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert RaptorModel.from_pretrained(out).dtype == torch.bfloat16
    assert (out / "preprocessor_config.json").is_file()
    assert (out / "modeling_raptor.py").is_file()
    assert main(command) == 2  # onto itself


def test_what_cannot_be_exported(model, make_model, tmp_path, capsys, monkeypatch):
    with pytest.raises(ValueError, match="format='tflite' is unknown; use one of safetensors, onnx, torch-export"):
        export_model(model, tmp_path, "tflite")
    with pytest.raises(ValueError, match="RaptorBackbone cannot be exported; use RaptorModel or"):
        export_model(make_model(RaptorBackbone), tmp_path)
    monkeypatch.setattr(export, "_write_program", lambda program, path: lambda images: [images, images])
    monkeypatch.setattr(export, "_largest_difference", lambda *_: 0.5)
    with pytest.raises(RuntimeError, match=r"gives outputs that differ by 5\.0e-01 from the model's, above 0\.0001"):
        export_model(model, tmp_path, "torch-export")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r'pip install "raptor_hf\[export\]"'):
        export_model(model, tmp_path, "onnx")
    assert main(["export"]) == 2
    assert main(["export", str(tmp_path)]) == 2
    assert main(["export", str(tmp_path), "--dtype", "bfloat16"]) == 2
    assert "is no folder of a saved Raptor" in capsys.readouterr().err
