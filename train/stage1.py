"""Stage 1: teach a backbone to answer in words, with cross-entropy on text (paper, section 4.2).

    accelerate launch train/stage1.py --config configs/tiny/stage1.yaml [key.sub=value ...]
    python train/stage1.py --config configs/ebench18k/stage1.yaml --dry-run
    torchrun --nproc-per-node 4 train/stage1.py --config configs/ebench18k/stage1.yaml

The loop is in lmm4edit/training/loop.py and shared by both stages; the configuration's keys are described in
lmm4edit/config.py. An interrupted run continues when the same command is given again.
"""

import sys

from lmm4edit.training.command import run_from_command_line

if __name__ == "__main__":
    sys.exit(run_from_command_line(stage=1))
