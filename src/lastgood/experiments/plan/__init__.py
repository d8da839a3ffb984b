"""The cells of each figure: which runs a configuration asks for, and whether the machine can make them."""
