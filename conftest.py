"""Makes pytest collect the YAML specs: `pytest -k gemma4_nano` runs the same cases as `harness run`."""

pytest_plugins = ["harness.pytest_plugin"]
