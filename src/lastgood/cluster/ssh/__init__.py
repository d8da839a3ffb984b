"""Commands on other hosts.

`Remote` runs commands through the machine's own ssh client, asks nothing, and bounds time and output. A command of
`Remote.start` lives no longer than its connection. A host that fails is a HostError that names it.
"""
