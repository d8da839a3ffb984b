"""Commands on other hosts."""
