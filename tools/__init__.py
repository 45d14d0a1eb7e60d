"""Tools that build what the harness measures; none is needed to run it."""
