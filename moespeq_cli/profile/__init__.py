"""Measure how a model routes: counts, reuse, agreement with the draft, and the report that shows them."""
