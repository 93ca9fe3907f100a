"""For clients of a kvweave server; needs nothing but the standard library."""
