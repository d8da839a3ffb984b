"""Hosts made ready for experiments: Ansible over SSH for those that there are, cloud VMs for others. No torch."""
