"""GPM: the state is stored straight into a mapped file."""
