"""Evaluate scorers on a manifest with human (or simulated) opinions.

    python eval/benchmark.py --manifest runs/demo/minibench/test.jsonl --scorers psnr,ssim,judge:tiny --out runs/eval

The same command as ``lmm4edit evaluate``; see ``lmm4edit evaluate --help`` for its options.
"""

from __future__ import annotations

import sys

from lmm4edit.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["evaluate"]
    main()
