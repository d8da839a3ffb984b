"""Hosts made ready for experiments, by Ansible over SSH. No torch."""
