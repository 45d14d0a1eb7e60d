"""Other projects' kernels for the same product, so that ours is timed beside them in one run.

Each module offers `available(device)` (None, or why not), `version()`, `supports(k, n, bits)` (None, or why not) and
`build(affine, copies)`. Loaded by name, only when a spec asks for the peer; nothing here is needed otherwise.

Whole engines are `decode_<name>.py`, behind the interface in `decoder.py`.
"""
