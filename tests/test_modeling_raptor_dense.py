"""Dense heads: what they read, what they learn from, how they are saved, and the pipelines they run in."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoModelForDepthEstimation, AutoModelForSemanticSegmentation, DPTImageProcessor, pipeline

from raptor_hf import RaptorConfig, RaptorForDepthEstimation, RaptorForSemanticSegmentation, RaptorModel
from raptor_hf.modeling_raptor_dense import DepthBins, depth_loss, segmentation_loss

HEADS = {
    "segmentation": (RaptorForSemanticSegmentation, AutoModelForSemanticSegmentation, {"num_labels": 5}),
    "depth": (RaptorForDepthEstimation, AutoModelForDepthEstimation, {"num_depth_bins": 32, "max_depth": 5.0}),
}


@pytest.fixture
def make_head(make_model):
    """Factory: a dense head by name."""
    return lambda name, **options: make_model(HEADS[name][0], **{**HEADS[name][2], **options})


def labels_for(name, size=(30, 50)):
    generator = torch.Generator().manual_seed(1)
    if name == "segmentation":
        return torch.randint(0, 5, (2, *size), generator=generator)
    return 4 * torch.rand(2, *size, generator=generator) + 0.1


def test_logits_are_linear_in_each_patch(make_head):
    model, pixels = make_head("segmentation"), torch.randn(2, 3, 28, 42)
    with torch.no_grad():
        logits = model(pixels).logits
        last = model.raptor(pixels).last_hidden_state
        weight = model.decode_head.weight[:, :, 0, 0]
    assert logits.shape == (2, 5, 2, 3)
    expected = F.linear(last[:, 5:], weight, model.decode_head.bias).unflatten(1, (2, 3)).permute(0, 3, 1, 2)
    torch.testing.assert_close(logits, expected)


def test_a_depth_is_the_mean_of_the_bins(make_head):
    model, pixels = make_head("depth"), torch.randn(2, 3, 28, 42)
    with torch.no_grad():
        depth = model(pixels).predicted_depth
        model.head.weight.zero_()
        model.head.bias.zero_()
        model.head.bias[7] = 100.0
        constant = model(pixels).predicted_depth
    assert depth.shape == (2, 28, 42)
    assert 1e-3 < depth.min() < depth.max() < 5.0
    centre = 1e-3 + (5.0 - 1e-3) / 32 * 7.5
    torch.testing.assert_close(constant, torch.full((2, 28, 42), centre))


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("registers", [0, 2, 4])
def test_registers_are_not_read(name, registers, make_head):
    model, pixels, span = make_head(name, num_register_tokens=registers), torch.randn(1, 3, 28, 28), slice(0, 0)

    def flood(module, inputs, output):
        output = output.clone()
        output[:, span] = 1e3
        return output

    model.raptor.layernorm.register_forward_hook(flood)
    with torch.no_grad():
        plain = model(pixels)[0]
        span = slice(1, 1 + registers)
        assert torch.equal(model(pixels)[0], plain)
        span = slice(0, 1)
        assert torch.equal(model(pixels)[0], plain) == (name == "segmentation")
        span = slice(1 + registers, 2 + registers)
        assert not torch.allclose(model(pixels)[0], plain, atol=0.1)


def test_the_segmentation_loss_leaves_out_what_it_is_told_to(make_head):
    model, pixels = make_head("segmentation", semantic_loss_ignore_index=4), torch.randn(2, 3, 28, 42)
    labels = labels_for("segmentation")
    outputs = model(pixels, labels=labels.int())
    resized = F.interpolate(outputs.logits, (30, 50), mode="bilinear")
    kept = labels != 4
    torch.testing.assert_close(outputs.loss, F.cross_entropy(resized.permute(0, 2, 3, 1)[kept], labels[kept]))
    nothing = model(pixels, labels=torch.full_like(labels, 4)).loss
    nothing.backward()
    assert nothing == 0
    assert all(not weight.grad.any() for weight in model.decode_head.parameters())


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_lowers_the_loss(name, dtype, make_head):
    model, pixels, labels = make_head(name).to(dtype), torch.randn(2, 3, 28, 42), labels_for(name)
    labels[:] = labels[:, :1, :1]  # a picture of one class or depth can be learned, noise cannot
    model.raptor.requires_grad_(False)
    optimizer, losses = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 3e-2), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(pixels, labels=labels).loss
        assert loss.dtype == torch.float32
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_labels_without_any_depth_teach_nothing():
    bins, logits = DepthBins(8), torch.randn(1, 8, 2, 2, requires_grad=True)
    for labels in (torch.zeros(1, 8, 8), torch.full((1, 8, 8), torch.nan), torch.full((1, 8, 8), 11.0)):
        loss = depth_loss(logits, labels, bins)
        loss.backward()
        assert loss == 0
    assert not logits.grad.any()


def test_one_depth_at_the_far_end_of_a_short_range_has_the_last_bin():
    bins = DepthBins(4, 0.5, 0.9)
    assert bins.numbers(torch.tensor([0.5, 0.9, 1.0, 0.49, torch.inf])).tolist() == [0, 3, -100, -100, -100]
    torch.testing.assert_close(bins.centres(), torch.tensor([0.55, 0.65, 0.75, 0.85]))


def test_half_precision_logits_have_the_loss_of_floats():
    logits, labels = torch.randn(1, 5, 4, 4).bfloat16(), torch.randint(0, 5, (1, 8, 8))
    torch.testing.assert_close(segmentation_loss(logits, labels), segmentation_loss(logits.float(), labels))


@pytest.mark.parametrize("name", HEADS)
def test_saved_loaded_and_shared_with_the_base(name, make_head, tmp_path):
    model, pixels = make_head(name), torch.randn(1, 3, 28, 28)
    model.save_pretrained(tmp_path / "head")
    model.raptor.save_pretrained(tmp_path / "base")
    loaded, report = HEADS[name][1].from_pretrained(tmp_path / "head", output_loading_info=True)
    assert type(loaded) is HEADS[name][0]
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(pixels)[0], model(pixels)[0])
    assert (tmp_path / "head" / "modeling_raptor_dense.py").is_file()
    new, report = HEADS[name][0].from_pretrained(tmp_path / "base", output_loading_info=True)
    prefix = "decode_head" if name == "segmentation" else "head"
    assert set(report["missing_keys"]) == {f"{prefix}.weight", f"{prefix}.bias"}
    base, report = RaptorModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert set(report["unexpected_keys"]) == {f"{prefix}.weight", f"{prefix}.bias"}
    assert all(torch.equal(value, new.raptor.state_dict()[key]) for key, value in base.state_dict().items())


@pytest.mark.parametrize("name", HEADS)
def test_tuples_and_states(name, make_head):
    model, pixels = make_head(name), torch.randn(2, 3, 28, 42)
    outputs = model(pixels, labels=labels_for(name), output_hidden_states=True)
    as_tuple = model(pixels, labels=labels_for(name), output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], outputs.loss)
    assert torch.equal(as_tuple[1], outputs[1])
    assert len(outputs.hidden_states) == len(as_tuple[2]) == 4


def test_pipelines(make_head, tmp_path):
    """Every pixel of the picture has a class, and a depth, at the picture's own size."""
    processor = DPTImageProcessor(size={"height": 28, "width": 42})
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (37, 53, 3), dtype=np.uint8))
    for name, task in (("segmentation", "image-segmentation"), ("depth", "depth-estimation")):
        make_head(name).save_pretrained(tmp_path / name)
        processor.save_pretrained(tmp_path / name)
        result = pipeline(task, str(tmp_path / name), image_processor=str(tmp_path / name))(image)
        if name == "segmentation":
            masks = np.stack([np.asarray(entry["mask"]) > 0 for entry in result])
            assert masks.shape[1:] == (37, 53)
            assert (masks.sum(axis=0) == 1).all()
            assert {entry["label"] for entry in result} <= {f"LABEL_{number}" for number in range(5)}
        else:
            assert result["predicted_depth"].shape == (37, 53)
            assert 0 < result["predicted_depth"].min()
            assert result["predicted_depth"].max() < 5.5


def test_a_range_that_is_none_is_refused():
    for fields in ({"num_depth_bins": 1}, {"min_depth": 0.0}, {"min_depth": 2.0, "max_depth": 2.0}):
        with pytest.raises(ValueError, match=r"at least 2 bins and a range of metres with 0 < min_depth < max_depth"):
            RaptorConfig(**fields)
