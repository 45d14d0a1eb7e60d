"""Grown pairs: the nano pair's function embedded in the geometry of a real Gemma 4 pair. Not Google's weights."""
