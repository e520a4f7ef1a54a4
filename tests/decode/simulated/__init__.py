"""Decoding on a virtual clock: what a governor, an eviction policy or a loop costs, without a GPU.

The loop, the governor, the expert cache and its copier are those of `runtime`; they read a clock that stands still
until the simulation moves it. Simulated are what surrounds them: the routing of a text, the link, the GPU and the time
that the host spends. `python -m tests.decode.simulated` prints a table; docs/gpu.md says how near it comes.

Not simulated: what a prompt takes, tokens drawn at a temperature, experts on disk, and that a pass has no gates once
every expert is there.
"""
