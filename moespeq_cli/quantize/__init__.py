"""Quantise the routed experts of a checkpoint: calibration, GPTQ, and the folder that comes out."""
