"""Drafting, verification and everything that turns logits into text."""
