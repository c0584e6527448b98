"""What `rung lab` has every kernel of .venv load, before its first cell: an interrupt or a missing name in a sentence."""

c.InteractiveShellApp.extensions.append("lablib.launch")  # noqa: F821, `c` comes from IPython
