"""The mirror node: a conductor and a shadow in one, fed by what was extracted from mirrored packets.

`follower` makes iterations of a training's events, `life` tells them to the shadow (gradients/shadow), `service` gives
them back. What cannot be told any more is said: the node is blind from that step on, and serves what it held before.
"""
