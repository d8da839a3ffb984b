"""What a trainer knows of its parameters, its updates, and the rest of a rank's state.

A rank record holds what gradients do not carry, flattened. `step_parts` (pure) puts a step together that comes in
parts, as ZeRO's group after group. Each rank reports which parameters its step did not update.
"""
