"""The compile gate: kernels of the verify path built without a GPU, their variants counted, their code read.

Run it as `python -m kernels.gate`. `entry` says what is compiled and expected, `cases` lists it for our kernels,
`record` finds the variants a call needs, `machine_code` reads one, `judge` compares.
"""
