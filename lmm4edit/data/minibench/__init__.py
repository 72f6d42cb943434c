"""A small, simulated benchmark of image edits, made on the spot from a seed.

Real photographs (those bundled with scikit-image) and generated scenes are edited by real image operations over the 21
tasks of EBench-18K (paper section 3.1), with a known degree of edit, artefact level and collateral change. The editing
models and the raters are **simulated** and named so everywhere; the ratings pass through the real MOS code.
"""
