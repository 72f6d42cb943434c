"""Statistics from stored predictions, and the report made of them. Nothing here needs a model or torch."""
