"""Training: one loop for both stages, its objectives, its plan, and what it leaves on disk.

Importing this package loads no torch; most of its modules do.
"""
