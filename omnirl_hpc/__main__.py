"""`python -m omnirl_hpc COMMAND …`, the same as `omnirl-hpc COMMAND …`."""

from omnirl_hpc.cli.main import main

if __name__ == "__main__":
    main()
