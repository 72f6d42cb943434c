"""Stage 2: train the score head, with mean squared error on the scores, starting from stage 1 (paper, section 4.2).

    accelerate launch train/stage2.py --config configs/tiny/stage2.yaml [key.sub=value ...]
    python train/stage2.py --config configs/ebench18k/stage2.yaml --dry-run
    torchrun --nproc-per-node 4 train/stage2.py --config configs/ebench18k/stage2.yaml

The loop is in lmm4edit/training/loop.py and shared by both stages; the configuration's keys are described in
lmm4edit/config.py. An interrupted run continues when the same command is given again.
"""

import sys

from lmm4edit.training.command import run_from_command_line

if __name__ == "__main__":
    sys.exit(run_from_command_line(stage=2))
