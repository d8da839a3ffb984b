"""FlowCheck: a mirror node makes a checkpoint of every step from the training's packets; this side only restores."""
