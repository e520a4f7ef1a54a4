"""`python -m moespeq_cli`."""

from moespeq_cli.app import main

main()
