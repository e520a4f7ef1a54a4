"""The commands of moespeq and its offline stages."""
