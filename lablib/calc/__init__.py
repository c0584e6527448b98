"""Calculators: standard library only, exact where a closed form exists."""
