"""The predictions file: what scorers and respondents write, and what all statistics are computed from."""
