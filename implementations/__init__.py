"""One file for each implementation. See `_template.py` to add one."""
