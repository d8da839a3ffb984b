"""The shadow: a process that applies the training's updates and restores from them.

What a shadow may apply and what it can give back is decided by pure modules (`state` and its components); simulations
drive them in the tests, alone and together with the conductor. No shadow applies iteration i until every shadow has
received it, so each can restore iteration i-1 and holds the gradients of i. `torn` finds buckets with gradients missing
for an iteration that every sender has finished or abandoned.
"""
