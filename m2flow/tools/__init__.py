"""Tools that a language model may call: one file each, found by name in `table`."""
