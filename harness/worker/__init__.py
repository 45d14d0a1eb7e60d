"""The child process: the only part of the harness that loads the engine. Started as `python -m harness.worker`."""
