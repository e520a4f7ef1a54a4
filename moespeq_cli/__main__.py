"""What `moespeq` and `python -m moespeq_cli` start."""


def main() -> None:
    """Run one command; Ctrl-C while its libraries are read ends it as it would a moment later. See `patience`."""
    try:
        from moespeq_cli.patience import import_patiently

        import_patiently()
        from moespeq_cli.app import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
