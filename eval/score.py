"""Score a manifest of edits with a judge.

    accelerate launch eval/score.py edits.jsonl --judge tiny --output scores.parquet

The same command as ``lmm4edit score``; see ``lmm4edit score --help`` for its options.
"""

from __future__ import annotations

import sys

from lmm4edit.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["score"]
    main()
