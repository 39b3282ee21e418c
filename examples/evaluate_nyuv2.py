r"""RMSE in metres on NYU Depth v2, the third column of the paper's Table 1 (arXiv 2512.19941).

    python examples/evaluate_nyuv2.py org/raptor-dinov2-b-k3 \
        --reference facebook/dinov2-with-registers-base --dataset nyu_data

The folder has `nyu2_train.csv` and `nyu2_test.csv`, or h5 files, or the official .mat file.

Every option of `raptor-hf probe depth` can follow, and replaces what is set here. Beside the report,
`table.md`, `.csv`, `.json` and `.tex` are written.
"""

import sys

from raptor_hf.cli import main

PROTOCOL = ["--dataset", "nyu_data"]
TABLE = ["--preset", "paper", "--table", "--output-dir", "runs/nyuv2"]

if __name__ == "__main__":
    sys.exit(main(["probe", "depth", *PROTOCOL, *TABLE, *sys.argv[1:]]))
