"""A run on a GPU: exact experts pass through a bounded pool of slots, passes are CUDA graphs."""
