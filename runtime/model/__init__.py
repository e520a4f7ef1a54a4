"""The library's models, with our experts in them."""
