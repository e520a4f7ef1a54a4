"""The online stage of moespeq, and what the offline stages share with it."""
