"""What a run was asked to do, and what it measured, as files."""
