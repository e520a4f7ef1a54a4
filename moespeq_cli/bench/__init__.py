"""`moespeq bench`: figures for the docs, each from a run."""
