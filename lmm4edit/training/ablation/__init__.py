"""Ablations: a grid of two-stage trainings, each evaluated, beside the paper's Table 6.

Importing this package loads no torch; :mod:`~lmm4edit.training.ablation.runs` does when it trains.
"""
