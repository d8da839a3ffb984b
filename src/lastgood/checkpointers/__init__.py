"""The systems: one file each, all behind the protocol in `base`."""
