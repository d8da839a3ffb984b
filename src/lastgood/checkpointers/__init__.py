"""The systems: a room for each, all behind the protocol in `base`, and the rooms that they share."""
