"""`moespeq run`: prompts in, text out."""
