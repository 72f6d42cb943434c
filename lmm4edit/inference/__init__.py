"""Scoring edits with a trained judge."""
