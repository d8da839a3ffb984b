"""Copies of a state on the host, taken while training goes on, and the check that nothing changed them.

On CUDA, copies run on one side stream for each device, and the optimizer waits on the device for an event. All device
memory that a copy needs is allocated in save(): the driver may wait for running kernels before it gives memory, and a
kernel of a collective that hangs never ends.
"""
