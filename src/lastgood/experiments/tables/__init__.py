"""Records of a figure as one table, and its CSV files."""
