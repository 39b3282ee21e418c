r"""Top-1 on ImageNet-1k, the first column of the paper's Table 1 (arXiv 2512.19941, Table 4 for the protocol).

    hf auth login   # ImageNet-1k is gated: accept its terms on the Hub first
    python examples/evaluate_imagenet.py org/raptor-dinov2-b-k3 \
        --reference facebook/dinov2-with-registers-base --head facebook/dinov2-with-registers-base-imagenet1k-1-layer

With `--head` the probe starts from that model's head and the better of start and end counts, as in the
paper. Without, it starts from a random head.

Every option of `raptor-hf probe classification` can follow, and replaces what is set here. Beside the report,
`table.md`, `.csv`, `.json` and `.tex` are written.
"""

import sys

from raptor_hf.cli import main

PROTOCOL = ["--dataset", "ILSVRC/imagenet-1k", "--eval-split", "validation"]
TABLE = ["--preset", "paper", "--table", "--output-dir", "runs/imagenet"]

if __name__ == "__main__":
    sys.exit(main(["probe", "classification", *PROTOCOL, *TABLE, *sys.argv[1:]]))
