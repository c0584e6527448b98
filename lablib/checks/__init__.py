"""The checks behind the exercises, one module a rung."""
