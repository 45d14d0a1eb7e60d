"""Gemma 4 target, MTP drafter and the exact round loop.

Nothing is imported here, so that `engine.flags` stays reachable with the standard library alone.
"""
