"""`python -m stratagem.client.cli` is the program `stratagem`."""

from stratagem.client.cli.main import main

if __name__ == "__main__":
    main()
