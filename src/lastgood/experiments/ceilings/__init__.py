"""What this machine's disk, memory and network can do: the ceilings that bounds are made of."""
