"""The smallest app of ours."""
