"""Several hosts: hostfiles, commands over SSH, checks of hosts, and a testbed of hosts inside one machine. No torch."""
