"""One module per command; each loads what it needs only when it runs."""
