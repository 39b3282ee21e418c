"""Time the phase search and the layer similarity beside plain implementations of the same formulas.

The search is compared with a triple loop over blocks, ends and starts, the similarity with `cosine_similarity`
broadcast over all pairs of layers (as the paper's definition reads). `--json FILE` writes the numbers.

    python benchmarks/phases.py --layers 1000 --blocks 10
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raptor_hf.phases import find_phases
from raptor_hf.similarity import layer_similarity


def loop_search(similarity: np.ndarray, num_blocks: int, min_length: int = 2) -> float:
    """Best weighted-mean score of `num_blocks` segments by plain loops, from an `(L, L)` matrix."""
    num_layers = len(similarity)
    table = np.pad(similarity.cumsum(0).cumsum(1), ((1, 0), (1, 0))).tolist()
    best = [0.0] + [float("-inf")] * num_layers
    for _ in range(num_blocks):
        longer = [float("-inf")] * (num_layers + 1)
        for end in range(min_length, num_layers + 1):
            for start in range(end - min_length + 1):
                total = table[end][end] - 2 * table[start][end] + table[start][start]
                longer[end] = max(longer[end], best[start] + total / (end - start))
        best = longer
    return best[num_layers]


def broadcast_similarity(batches: list[torch.Tensor]) -> np.ndarray:
    """Mean cosine over all pairs of layers at once, from batches of shape `(L + 1, batch, tokens, hidden)`."""
    sums = [torch.cosine_similarity(b[1:, None], b[None, 1:], dim=-1).double().mean((2, 3)) for b in batches]
    return torch.stack(sums).mean(dim=0).numpy()


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Shortest of `repeats` timed runs, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_search(num_layers: int, num_blocks: int, repeats: int, loop_layers: int) -> list[dict[str, Any]]:
    """Rows of the search: ours at `num_layers`, ours and the loops at `loop_layers`, which must agree."""
    rows = []
    for layers, loops in ((num_layers, False), (loop_layers, True)):
        noise = np.random.default_rng(0).normal(size=(layers, layers))
        similarity = np.tanh(noise + noise.T)
        np.fill_diagonal(similarity, 1.0)
        name = f"search, L={layers}, k={num_blocks}"
        rows.append({"what": name, "ours_s": seconds(partial(find_phases, similarity, num_blocks), repeats)})
        if loops:
            rows[-1]["plain_s"] = seconds(partial(loop_search, similarity, num_blocks), 1)
            gap = abs(loop_search(similarity, num_blocks) - (find_phases(similarity, num_blocks).score or 0.0))
            rows[-1]["difference"] = gap
    return rows


def measure_similarity(images: int, tokens: int, hidden: int, layers: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of the similarity on random states of `images` images, in float32 and bfloat16."""
    states = torch.randn(layers + 1, images, tokens, hidden, generator=torch.Generator().manual_seed(0)).cumsum(dim=0)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        batch = states.to(dtype)
        row: dict[str, Any] = {"what": f"similarity, L={layers}, {images} images of {tokens} x {hidden}, {dtype}"}
        row["ours_s"] = seconds(partial(layer_similarity, [list(batch)]), repeats)
        row["images_per_s"] = images / row["ours_s"]
        if dtype == torch.float32:
            row["plain_s"] = seconds(partial(broadcast_similarity, [batch]), 1)
            row["difference"] = float(np.abs(broadcast_similarity([batch]) - layer_similarity([list(batch)])).max())
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000, help="layers of the large search")
    parser.add_argument("--blocks", type=int, default=10, help="blocks of both searches")
    parser.add_argument("--loop-layers", type=int, default=100, help="layers of the search that plain loops repeat")
    parser.add_argument("--images", type=int, default=8, help="images of the similarity")
    parser.add_argument("--tokens", type=int, default=261, help="tokens of an image")
    parser.add_argument("--hidden", type=int, default=768, help="features of a token")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the shortest counts")
    parser.add_argument("--json", type=Path, default=None, help="file for the numbers")
    args = parser.parse_args(argv)
    rows = measure_search(args.layers, args.blocks, args.repeats, args.loop_layers)
    rows += measure_similarity(args.images, args.tokens, args.hidden, 12, args.repeats)
    print(f"{'what':<62} {'ours s':>9} {'plain s':>9} {'images/s':>9} {'difference':>11}")
    for row in rows:
        cells = [row["ours_s"], row.get("plain_s"), row.get("images_per_s"), row.get("difference")]
        texts = ["-" if cell is None else f"{cell:.3g}" for cell in cells]
        print(f"{row['what']:<62} {texts[0]:>9} {texts[1]:>9} {texts[2]:>9} {texts[3]:>11}")
    if args.json is not None:
        args.json.write_text(json.dumps({"threads": torch.get_num_threads(), "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
