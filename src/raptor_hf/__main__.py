"""`python -m raptor_hf COMMAND ...`: what `accelerate launch -m raptor_hf` and `torchrun -m raptor_hf` start."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
