r"""Mean IoU on ADE20K's 150 classes, the second column of the paper's Table 1 (arXiv 2512.19941).

    python examples/evaluate_ade20k.py org/raptor-dinov2-b-k3 \
        --reference facebook/dinov2-with-registers-base --dataset ADEChallengeData2016

Every option of `raptor-hf probe segmentation` can follow, and replaces what is set here. Beside the report,
`table.md`, `.csv`, `.json` and `.tex` are written.
"""

import sys

from raptor_hf.cli import main

PROTOCOL = ["--dataset", "ADEChallengeData2016", "--eval-split", "validation"]
TABLE = ["--preset", "paper", "--table", "--output-dir", "runs/ade20k"]

if __name__ == "__main__":
    sys.exit(main(["probe", "segmentation", *PROTOCOL, *TABLE, *sys.argv[1:]]))
