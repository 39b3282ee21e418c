"""Layer-layer similarity: how far the states of a ViT turn from layer to layer (arXiv 2512.19941, Sec. 2, Fig. 1).

States in, matrices out: no model and no trainer. [`raptor_hf.phases`] cuts the matrices into phases. Layers, states
and token groups are those of [`raptor_hf.tokens`].
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from .tokens import TokenLayout

TOKENS = ("all", "cls", "patch", "registers", "cls+mean_patch")


def layer_similarity(
    hidden_states: Iterable[Sequence[torch.Tensor]], tokens: str = "all", layout: TokenLayout | None = None
) -> np.ndarray:
    """Mean cosine between the states of every two layers (arXiv 2512.19941, Sec. 2, Fig. 1).

    `S[l-1, m-1] = mean over images and tokens of <a_l, a_m> / (|a_l| |a_m|)`, the same token at both layers. 16-bit
    states are upcast to float32 and cosines summed in float64 (error about 1e-8); memory does not grow with the number
    of images. All tokens count alike, also when batches differ in size or resolution. The cosine with a zero vector is
    0; the diagonal is 1 by definition.

    Args:
        hidden_states: one item per batch, a sequence of the `L + 1` states `a_0..a_L`, each of shape
            `(batch_size, seq_length, hidden_size)`; state 0, the embedding output, is left out of the matrix.
        tokens: `"all"`, `"cls"`, `"patch"`, `"registers"`, or `"cls+mean_patch"` (the authors' notebook: two vectors
            per image, the cls token and the mean patch, whose two cosines are averaged).
        layout: where the tokens sit; needed unless `tokens` is `"all"` or `"cls"`, or `hidden_states.layout` says it.

    Returns:
        `(L, L)` float64 array, exactly symmetric, values in -1..1.

    Raises:
        ValueError: if `tokens` is unknown, is not in the model, or needs a layout that is missing or does not fit; if
            there is no image; if a batch's states differ in shape or number; if a state of layers `1..L` is not finite.
    """
    return layer_similarities(hidden_states, (tokens,), layout)[tokens]


def layer_similarities(
    hidden_states: Iterable[Sequence[torch.Tensor]],
    tokens: Sequence[str] | None = None,
    layout: TokenLayout | None = None,
) -> dict[str, np.ndarray]:
    """[`layer_similarity`] of several token groups in one pass over the states, the products of a token made once.

    Args:
        hidden_states, layout: as [`layer_similarity`].
        tokens: names of what is compared, as there; by default `"all"` and every group that the layout has, so that
            a group the model lacks is absent.

    Returns:
        a `(L, L)` float64 array for each name.

    Raises:
        ValueError: as [`layer_similarity`]; if `tokens` is left out and no layout is known.
    """
    layout = getattr(hidden_states, "layout", None) if layout is None else layout
    names = list(dict.fromkeys(("all", *(layout.groups if layout else ("patch",))) if tokens is None else tokens))
    needs_layout = _checked_tokens(names, layout)
    layers: list[torch.Tensor] = []
    totals = {name: torch.zeros((), dtype=torch.float64) for name in names}
    counts = dict.fromkeys(names, 0)
    for states in hidden_states:
        layers = _checked_layers(states, len(layers), layout if needs_layout else None)
        for name, (total, count) in _cosine_sums(layers, names, layout or TokenLayout()).items():
            totals[name], counts[name] = totals[name] + total, counts[name] + count
    if not layers or 0 in counts.values():
        raise ValueError("hidden_states holds no image; pass at least one batch (a used-up iterator is empty).")
    return {name: _mean(totals[name], counts[name]) for name in names}


def _mean(total: torch.Tensor, count: int) -> np.ndarray:
    similarity = (total + total.T) / (2 * count)
    return similarity.clamp(-1.0, 1.0).fill_diagonal_(1.0).numpy()


def _checked_tokens(names: Sequence[str], layout: TokenLayout | None) -> bool:
    """Whether any of `names` needs a layout, once all are known to exist."""
    for name in names:
        if name not in TOKENS:
            raise ValueError(f"tokens={name!r} is not known; use one of {', '.join(map(repr, TOKENS))}.")
    needs_layout = [name for name in names if name not in ("all", "cls")]
    if needs_layout and layout is None:
        raise ValueError(
            f"tokens={needs_layout[0]!r} needs the number of registers; pass layout=TokenLayout(num_registers)."
        )
    for name in names:
        (layout or TokenLayout()).span("cls" if name == "cls+mean_patch" else name)
    return bool(needs_layout)


def _checked_layers(states: Sequence[torch.Tensor], num_layers: int, layout: TokenLayout | None) -> list[torch.Tensor]:
    """States `1..L` of a batch; `num_layers` is 0 for the first batch, `layout` is given where it matters."""
    layers = list(states)
    shapes = sorted({tuple(getattr(state, "shape", ())) for state in layers})
    if len(layers) < 2 or len(shapes) > 1 or len(shapes[0]) != 3:
        rule = "L + 1 tensors of one shape (batch_size, seq_length, hidden_size)"
        raise ValueError(f"{len(layers)} states of shapes {shapes} are no batch of {rule}; pass a list of batches.")
    if num_layers not in (0, len(layers) - 1):
        raise ValueError(f"hidden_states holds batches of {num_layers + 1} and {len(layers)} states; use one model.")
    if layout is not None and shapes[0][1] <= layout.num_prefix_tokens:
        raise ValueError(f"states of {shapes[0][1]} tokens hold no patch under {layout}; pass the model's own layout.")
    return layers[1:]


@torch.no_grad()
def _cosine_sums(
    layers: list[torch.Tensor], names: Sequence[str], layout: TokenLayout
) -> dict[str, tuple[torch.Tensor, int]]:
    """Per name: sum over the batch's vectors of the cosines between layers, `(L, L)` float64 on the CPU, and how many
    vectors.
    """
    device, (batch_size, seq_length, hidden_size) = layers[0].device, layers[0].shape
    dtype = torch.promote_types(layers[0].dtype, torch.float32)
    budget = 2**22 if device.type == "cpu" else 2**26  # elements at a time: fits a cache, fills an accelerator
    step = max(1, budget // max(1, len(layers) * seq_length * hidden_size))
    sums = {name: (torch.zeros((), dtype=torch.float64), 0) for name in names}
    for start in range(0, batch_size, step):
        chunk = [state[start : start + step] for state in layers]
        whole = _token_cosines([state.to(device, dtype) for state in chunk]) if "all" in names else None
        for name, (total, count) in sums.items():
            if name == "cls+mean_patch":
                pooled = [layout.pool(state.to(device, dtype)).unflatten(-1, (2, hidden_size)) for state in chunk]
                cosines = _token_cosines(pooled)
            elif whole is None:
                cosines = _token_cosines([layout.select(state, name).to(device, dtype) for state in chunk])
            else:
                cosines = whole[:, layout.span(name)]
            added = cosines.flatten(0, 1).cpu().sum(dim=0, dtype=torch.float64)
            sums[name] = (total + added, count + cosines.shape[0] * cosines.shape[1])
    return sums


def _token_cosines(layers: list[torch.Tensor]) -> torch.Tensor:
    """States `(images, tokens, hidden_size)` of each layer to the cosines `(images, tokens, L, L)` of each token."""
    vectors = torch.stack(layers, dim=2)
    return _cosines(vectors.flatten(0, 1)).unflatten(0, vectors.shape[:2])


def _cosines(vectors: torch.Tensor) -> torch.Tensor:
    """Cosines between each token's layers, `(tokens, L, hidden_size)` to `(tokens, L, L)`, one product per token."""
    with torch.autocast(vectors.device.type, enabled=False):  # a caller's autocast would round to bfloat16
        products = vectors @ vectors.mT
    squares = products.diagonal(dim1=-2, dim2=-1)
    if vectors.dtype != torch.float64 and not bool(((squares > 1e-25) & (squares < 1e35)).all()):  # float32's limits
        return _cosines(vectors.cpu().double())
    bad = torch.nonzero(~torch.isfinite(squares).all(dim=0)).flatten() + 1
    if len(bad):
        raise ValueError(f"states of layers {bad.tolist()} hold NaN or inf; check the images and the precision.")
    scale = torch.where(squares > 0, squares.rsqrt(), 0.0)
    return products * scale[..., :, None] * scale[..., None, :]
