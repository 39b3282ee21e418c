"""Time a Raptor's forward pass beside its teacher's, the research code's block and the bare matrix products.

All start at the pixels and end after the final LayerNorm, with random weights, in evaluation and inference mode;
bfloat16 means bfloat16 weights. The contenders:

    teacher         the `transformers` model the Raptor stands for, 12 layers of its own
    research        the same schedule of blocks as in the paper's code: `nn.MultiheadAttention`, called as there with
                    its default `need_weights=True`, LayerNorm eps 1e-5, and SwiGLU of width 4D (the paper says GELU)
    research-fused  the same with `need_weights=False`, which lets the attention be fused
    products        the matrix products of the Raptor's forward pass alone, batched as there, into buffers that are
                    there already: patch embedding, qkv, logits, context, proj, fc1, fc2; no bias, no softmax (and not
                    the depth scale's, 16 wide, of one row). The attention's are two `bmm`, which a fused kernel that
                    keeps the logits in cache can beat: a ceiling of separate products

    python benchmarks/inference.py --shapes vit-b --output runs/inference.json
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timing import (
    SHAPES,
    Part,
    Shape,
    comparison,
    interleave,
    make_parser,
    make_teacher,
    new_report,
    parse,
    save,
    text_of,
)
from torch import nn

from raptor_hf import RaptorModel, Teacher


class ResearchBlock(nn.Module):
    """A block that does the work of the research code's (arXiv 2512.19941), in torch's own modules.

    Args:
        hidden_size, num_heads: of the states.
        need_weights: whether the attention weights are computed and averaged over heads, as there, and then dropped.
    """

    def __init__(self, hidden_size: int, num_heads: int, need_weights: bool = True) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.norm1 = nn.LayerNorm(hidden_size)
        self.attention = nn.MultiheadAttention(hidden_size, num_heads, batch_first=True)
        self.scale1 = nn.Parameter(torch.full((hidden_size,), 1e-5))
        self.norm2 = nn.LayerNorm(hidden_size)
        self.fc1 = nn.Linear(hidden_size, 8 * hidden_size)  # gate and value, each 4D wide
        self.fc2 = nn.Linear(4 * hidden_size, hidden_size)
        self.scale2 = nn.Parameter(torch.full((hidden_size,), 1e-5))
        self.depth1 = nn.Linear(1, 16)
        self.depth2 = nn.Linear(16, 3 * hidden_size)
        nn.init.normal_(self.depth2.weight, std=1e-4)
        nn.init.normal_(self.depth2.bias, std=1e-4)

    def forward(self, states: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        """States `(batch_size, seq_length, hidden_size)` to the next ones; `depth` is one layer number per image."""
        scales = 1 + self.depth2(nn.functional.silu(self.depth1(depth[:, None, None])))
        scale_attention, scale_mlp, scale_out = scales.chunk(3, dim=-1)
        normed = self.norm1(states)
        branch, _ = self.attention(normed, normed, normed, need_weights=self.need_weights)
        states = states + scale_attention * (self.scale1 * branch)
        gate, value = self.fc1(self.norm2(states)).chunk(2, dim=-1)
        states = states + scale_mlp * (self.scale2 * self.fc2(nn.functional.silu(gate) * value))
        return scale_out * states


def research_blocks(shape: Shape, need_weights: bool) -> nn.ModuleList:
    """The three blocks."""
    return nn.ModuleList(ResearchBlock(shape.hidden_size, shape.num_heads, need_weights) for _ in shape.repeats)


class ResearchRaptor(nn.Module):
    """Research blocks between the embeddings and the final norm of a [`RaptorModel`], by its schedule."""

    def __init__(self, raptor: RaptorModel, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.embeddings, self.blocks, self.layernorm = raptor.embeddings, blocks, raptor.layernorm
        self.schedule: Any = raptor.config.block_schedule

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Images `(batch_size, channels, height, width)` to `(batch_size, seq_length, hidden_size)`."""
        states = self.embeddings(pixel_values)
        for layer, number in enumerate(self.schedule, start=1):
            states = self.blocks[number](states, states.new_full((len(states),), layer))
        return self.layernorm(states)


@dataclass(frozen=True)
class Product:
    """`batch` products of `(rows, inner)` with `(inner, columns)`, or with `weight` one with a weight of that name."""

    name: str
    batch: int
    rows: int
    inner: int
    columns: int
    weight: str | None = None

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.rows * self.inner * self.columns


def forward_products(shape: Shape, batch_size: int, embeddings: bool = True) -> list[Product]:
    """The matrix products of a Raptor's forward pass in their order; without `embeddings` from state 0 on."""
    hidden, tokens = shape.hidden_size, batch_size * shape.seq_length
    heads, length, head_dim = batch_size * shape.num_heads, shape.seq_length, shape.hidden_size // shape.num_heads
    products = []
    if embeddings:
        pixels = 3 * shape.patch_size**2
        products.append(Product("patches", 1, batch_size * shape.num_patches, pixels, hidden, "patches"))
    for block in shape.schedule:
        products += [
            Product("qkv", 1, tokens, hidden, 3 * hidden, f"qkv {block}"),
            Product("logits", heads, length, head_dim, length),
            Product("context", heads, length, length, head_dim),
            Product("proj", 1, tokens, hidden, hidden, f"proj {block}"),
            Product("fc1", 1, tokens, hidden, 4 * hidden, f"fc1 {block}"),
            Product("fc2", 1, tokens, 4 * hidden, hidden, f"fc2 {block}"),
        ]
    return products


class MatrixProducts:
    """Makes matrix products one after the other and nothing else; layers share buffers, weights are a block's own.

    Args:
        products: those of a forward pass.
        dtype, device: of the operands.
        backward: also the two products that give each operand's gradient, in reverse order.
    """

    def __init__(
        self, products: Sequence[Product], dtype: torch.dtype, device: torch.device, backward: bool = False
    ) -> None:
        self._buffers: dict[tuple[str, ...], torch.Tensor] = {}
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.calls: list[tuple[Callable[..., Any], torch.Tensor, torch.Tensor, torch.Tensor]] = []
        gradients = []
        for product in products:
            left, right, output = self._operands(product)
            multiply = torch.bmm if product.weight is None else torch.mm
            self.calls.append((multiply, left, right, output))
            if backward:
                upstream = self._buffer("upstream", product.name, shape=output.shape)
                to_left = self._buffer("left gradient", product.name, shape=left.shape)
                to_right = self._buffer("right gradient", product.name, shape=right.mT.shape)
                gradients.append((multiply, upstream.mT, left, to_right))  # transposed, as weights are stored
                gradients.append((multiply, upstream, right.mT, to_left))
        self.calls += reversed(gradients)

    @torch.no_grad()
    def __call__(self) -> None:
        """Makes them."""
        for multiply, left, right, output in self.calls:
            multiply(left, right, out=output)

    def _operands(self, product: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = () if product.weight is not None else (product.batch,)
        left = self._buffer("left", product.name, shape=(*batch, product.rows, product.inner))
        # Weights and keys are stored with their rows along the columns of the product; values are not.
        is_plain = product.name == "context"
        stored = (product.inner, product.columns) if is_plain else (product.columns, product.inner)
        right = self._buffer("right", product.weight or product.name, shape=(*batch, *stored))
        output = self._buffer("output", product.name, shape=(*batch, product.rows, product.columns))
        return left, right if is_plain else right.mT, output

    def _buffer(self, *key: str, shape: Sequence[int]) -> torch.Tensor:
        if key not in self._buffers:
            self._buffers[key] = torch.randn(*shape, **self._options)
        return self._buffers[key]


def contender(name: str, shape: Shape, teacher: Teacher, raptor: RaptorModel) -> nn.Module:
    """The model `name` of `AGAINST`, float32, on the CPU."""
    if name == "teacher":
        return teacher.model
    return ResearchRaptor(raptor, research_blocks(shape, need_weights=name == "research"))


def forward_pass(model: nn.Module, pixels: torch.Tensor, compiled: bool) -> Part:
    """One forward pass of `model`, moved to the device and dtype of `pixels`, in inference mode."""
    model = model.to(pixels.device, pixels.dtype).eval().requires_grad_(False)
    if compiled:
        model.compile()

    @torch.inference_mode()
    def run() -> None:
        """Runs it."""
        model(pixels)

    return run


def measure(name: str, batch_size: int, dtype_name: str, args: Any) -> list[dict[str, Any]]:
    """Rows of one configuration."""
    torch.compiler.reset()  # else one size after the other is taken for a dynamic one
    shape, dtype, device = SHAPES[name], getattr(torch, dtype_name), torch.device(args.device)
    teacher = make_teacher(shape)
    raptor = RaptorModel.from_teacher(teacher, shape.repeats)
    others = {against: contender(against, shape, teacher, raptor) for against in args.against if against != "products"}
    pixels = torch.randn(batch_size, 3, shape.image_size, shape.image_size).to(device, dtype)
    labels = {"shape": name, "batch_size": batch_size, "dtype": dtype_name, "compiled": args.compile}
    ours, rows = forward_pass(raptor, pixels, args.compile), []
    for against in args.against:
        if against == "products":
            theirs: Part = MatrixProducts(forward_products(shape, batch_size), dtype, device)
        else:
            theirs = forward_pass(others[against], pixels, args.compile)
        times = interleave([ours], [theirs], args.pairs, device, args.min_seconds)
        own, other = ([pair[side][0] for pair in times] for side in (0, 1))
        rows.append(comparison(own, other, **labels, what="inference", against=against))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the table, writes the file, and returns 0."""
    args = parse(make_parser(__doc__), argv)
    report = new_report("inference", args, argv)
    for name in args.shapes:
        for batch_size in args.batch_sizes:
            for dtype_name in args.dtypes:
                report["rows"] += measure(name, batch_size, dtype_name, args)
                save(report, args.output)
    print(text_of([report]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
