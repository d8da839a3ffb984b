"""Facts of this machine, and the lock that gives one run the machine for itself."""
