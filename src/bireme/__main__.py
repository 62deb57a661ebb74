"""`python -m bireme`, which is what launchers such as torchrun start: the same as the command `bireme`."""

from bireme.cli.main import main

if __name__ == "__main__":
    main()
