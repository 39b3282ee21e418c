"""Similarity of layers against plain loops, in one pass over any token groups."""

import itertools
import math

import numpy as np
import pytest
import torch

from raptor_hf.phases import find_phases
from raptor_hf.similarity import TOKENS, layer_similarities, layer_similarity
from raptor_hf.tokens import TokenLayout


class Stream(list):
    """A list of batches that knows its token layout, as a teacher's iterator does."""

    layout = TokenLayout(num_register_tokens=2)


def make_batches(sizes, num_layers=4, seq_length=9, hidden_size=16, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batches = Stream()
    for size in sizes:
        steps = torch.randn(num_layers + 1, size, seq_length, hidden_size, generator=generator, dtype=torch.float64)
        batches.append(tuple(steps.cumsum(dim=0).to(dtype)))
    return batches


def loop_reference(batches, tokens):
    """Mean cosine by plain loops in float64; two registers after the cls token."""
    num_layers = len(batches[0]) - 1
    groups = {"all": range(9), "cls": range(1), "registers": range(1, 3), "patch": range(3, 9)}
    total, count = np.zeros((num_layers, num_layers)), 0
    for batch in batches:
        layers = [state.double().numpy() for state in batch[1:]]
        for image in range(len(layers[0])):
            if tokens == "cls+mean_patch":
                vectors = [[layer[image, 0], layer[image, 3:].mean(axis=0)] for layer in layers]
            else:
                vectors = [[layer[image, token] for token in groups[tokens]] for layer in layers]
            for i, j in itertools.product(range(num_layers), repeat=2):
                for a, b in zip(vectors[i], vectors[j], strict=True):
                    total[i, j] += a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
            count += len(vectors[0])
    return total / count


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-7), (torch.bfloat16, 1e-7), (torch.float16, 1e-7)],
)
def test_similarity_equals_plain_loops(tokens, dtype, tolerance):
    batches = make_batches([3, 1], dtype=dtype)
    similarity = layer_similarity(batches, tokens)
    assert similarity.dtype == np.float64
    np.testing.assert_allclose(similarity, loop_reference(batches, tokens), rtol=0, atol=tolerance)


@pytest.mark.parametrize("tokens", TOKENS)
def test_similarity_is_symmetric_with_unit_diagonal(tokens):
    similarity = layer_similarity(make_batches([2, 3]), tokens)
    assert np.array_equal(similarity, similarity.T)
    assert np.array_equal(np.diag(similarity), np.ones(4))
    assert np.abs(similarity).max() <= 1.0


def test_streaming_equals_one_shot():
    batches = make_batches([1, 4, 2])
    whole = [tuple(torch.cat(states) for states in zip(*batches, strict=True))]
    stream = layer_similarity(iter(list(batches)))
    np.testing.assert_allclose(stream, layer_similarity(whole), rtol=0, atol=1e-12)
    assert np.array_equal(stream, layer_similarity(batches))


def test_a_batch_larger_than_a_chunk_equals_its_images_one_by_one():
    batch = torch.randn(3, 3, 12, 2**16, generator=torch.Generator().manual_seed(0)).cumsum(dim=0)
    images = [tuple(state[i : i + 1] for state in batch) for i in range(3)]
    np.testing.assert_allclose(layer_similarity([batch]), layer_similarity(images), rtol=0, atol=1e-9)


def test_float32_sums_stay_accurate_over_many_tokens():
    batches = make_batches([16, 16], num_layers=12, seq_length=33, hidden_size=192)
    exact = layer_similarity([tuple(state.double() for state in batch) for batch in batches])
    assert np.abs(layer_similarity(batches) - exact).max() < 5e-8


def test_batches_of_unlike_resolution_count_by_tokens():
    small, large = make_batches([1], seq_length=5), make_batches([2], seq_length=17, seed=1)
    mixed = layer_similarity([*small, *large])
    expected = (5 * layer_similarity(small) + 34 * layer_similarity(large)) / 39
    np.testing.assert_allclose(mixed, expected, rtol=0, atol=1e-12)


def test_embedding_state_is_left_out():
    batches = make_batches([2])
    changed = [(torch.full_like(batch[0], torch.nan), *batch[1:]) for batch in batches]
    assert np.array_equal(layer_similarity(batches), layer_similarity(changed))


def test_stacked_states_and_gradients_are_taken():
    batches = make_batches([2])
    stacked = [torch.stack(batch).requires_grad_() for batch in batches]
    assert np.array_equal(layer_similarity(stacked), layer_similarity(batches))


def test_autocast_does_not_round_the_products():
    batches = make_batches([2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer_similarity(batches)
    assert np.array_equal(inside, layer_similarity(batches))


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_scale_of_the_states_does_not_matter(scale):
    batches = make_batches([2])
    scaled = [tuple(state * scale for state in batch) for batch in batches]
    np.testing.assert_allclose(layer_similarity(scaled), layer_similarity(batches), rtol=0, atol=1e-6)


def test_cosine_with_a_zero_vector_is_zero():
    batch = [state.clone() for state in make_batches([1], seq_length=2)[0]]
    both = layer_similarity([batch])
    one = layer_similarity([[state[:, :1] for state in batch]])
    batch[2][:, 1] = 0.0
    similarity = layer_similarity([batch])
    np.testing.assert_allclose(similarity[1, [0, 2, 3]], one[1, [0, 2, 3]] / 2, rtol=0, atol=1e-7)
    np.testing.assert_allclose(similarity[0, 2:], both[0, 2:], rtol=0, atol=1e-7)
    assert similarity[1, 1] == 1.0


def test_turning_states_are_less_similar_and_their_phases_are_found():
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(3, 1, 1, 5, 64, generator=generator)
    states = [directions[0].expand(1, 4, 5, 64)[0]]
    for block in (0, 0, 0, 1, 1, 1, 1, 2, 2):
        states.append(directions[block, 0] + 0.3 * torch.randn(4, 5, 64, generator=generator))
    similarity = layer_similarity([states])
    assert similarity[0, 1] > 0.8 > similarity[0, 8]
    assert find_phases(similarity, 3).repeats == (3, 4, 2)


def test_layout_argument_comes_before_the_attribute():
    batches = make_batches([2])
    assert np.array_equal(
        layer_similarity(batches, "patch", TokenLayout(2)), layer_similarity(list(batches), "patch", TokenLayout(2))
    )
    assert not np.array_equal(layer_similarity(batches, "patch", TokenLayout(0)), layer_similarity(batches, "patch"))


@pytest.mark.parametrize("tokens", ["patch", "registers", "cls+mean_patch"])
def test_layout_is_needed_for_token_groups(tokens):
    with pytest.raises(ValueError, match="needs the number of registers; pass layout=TokenLayout"):
        layer_similarity(list(make_batches([1])), tokens)


def test_tokens_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="tokens='mean' is not known; use one of 'all', 'cls'"):
        layer_similarity(make_batches([1]), "mean")
    with pytest.raises(ValueError, match="tokens='registers' asked of a model without register tokens"):
        layer_similarity(make_batches([1]), "registers", TokenLayout(0))
    with pytest.raises(ValueError, match="states of 9 tokens hold no patch under TokenLayout"):
        layer_similarity(make_batches([1]), "patch", TokenLayout(8))


def test_wrong_batches_are_refused():
    batches = make_batches([2, 2])
    shorter = [batches[0], batches[1][:-1]]
    with pytest.raises(ValueError, match="holds batches of 5 and 4 states"):
        layer_similarity(shorter)
    with pytest.raises(ValueError, match="1 states of shapes"):
        layer_similarity([batches[0][:1]])
    with pytest.raises(ValueError, match="pass a list of batches"):
        layer_similarity(batches[0])
    with pytest.raises(ValueError, match=r"5 states of shapes \[\(1, 9, 16\), \(2, 9, 16\)\]"):
        layer_similarity([(*batches[0][:-1], batches[0][-1][:1])])


@pytest.mark.parametrize("batches", [[], iter(()), [tuple(torch.zeros(5, 0, 9, 16))]])
def test_no_image_is_refused(batches):
    with pytest.raises(ValueError, match="hidden_states holds no image"):
        layer_similarity(batches)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_states_that_are_not_finite_are_refused(value, dtype):
    batches = make_batches([2], dtype=dtype)
    batches[0][3][1, 4, 2] = value
    with pytest.raises(ValueError, match=r"states of layers \[3\] hold NaN or inf"):
        layer_similarity(batches)


def test_groups_of_one_pass_are_those_of_passes_apart():
    batches = make_batches([3, 2])
    together = layer_similarities(batches)
    assert list(together) == ["all", "cls", "registers", "patch"]
    for tokens, similarity in layer_similarities(batches, TOKENS).items():
        np.testing.assert_allclose(similarity, layer_similarity(batches, tokens), rtol=0, atol=1e-12)
    apart = layer_similarities(batches, ["patch", "cls+mean_patch"])
    np.testing.assert_allclose(apart["patch"], together["patch"], rtol=0, atol=1e-12)
    assert list(apart) == ["patch", "cls+mean_patch"]


def test_without_cls_there_is_no_such_group():
    batches, layout = make_batches([3]), TokenLayout(2, has_cls_token=False)
    assert list(layer_similarities(batches, layout=layout)) == ["all", "registers", "patch"]
    with_cls = layer_similarity(batches, "patch", TokenLayout(1))
    assert np.array_equal(layer_similarity(batches, "patch", layout), with_cls)  # the same positions, another name
    for tokens in ("cls", "cls+mean_patch"):
        with pytest.raises(ValueError, match=r"tokens='cls' asked of a model without a cls token; use 'registers'"):
            layer_similarity(batches, tokens, layout)


def test_all_groups_need_a_layout():
    with pytest.raises(ValueError, match=r"tokens='patch' needs the number of registers; pass layout=TokenLayout"):
        layer_similarities(list(make_batches([1])))
