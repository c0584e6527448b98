"""Figures: they take numbers and compute nothing."""
