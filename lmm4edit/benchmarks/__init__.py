"""Readers of published benchmarks; each makes a manifest or questions. (None yet: the mini benchmark is in
lmm4edit/data.)"""
