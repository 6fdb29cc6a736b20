"""The command line, one command a file. Nothing here imports jax before the arguments are read."""
