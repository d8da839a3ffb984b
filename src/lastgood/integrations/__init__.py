"""Lastgood inside other libraries' own checkpoint calls. Each module imports its library only when it is used."""
