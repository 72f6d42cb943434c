"""Scorers give values for edits: classic metrics and the trained judge, behind one protocol."""
