"""The judge: prompts, packing, backbone, adapters, score head, checkpoints, and nothing else.

Importing this package loads no torch; its modules do.
"""
