"""Several hosts inside one machine.

Its nodes are network namespaces, and hosts like others: nothing above knows the difference. docs/multinode.md.
"""
