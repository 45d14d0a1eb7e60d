"""The declarative side: YAML specs become cases, pytest items, child processes and a record.

The parent process never imports torch; only `harness.worker` runs an engine.
"""
