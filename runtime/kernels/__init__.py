"""CUDA kernels of the expert layer: compiling, launching, layouts. Importing it needs no GPU and no CuPy."""
