"""Checkmate: gradients to shadows that hold the model one update behind.

`incarnation` is the training's side of one life of the job, `restore` fences the shadows, chooses a step that all of
them hold, and fetches it. In switch mode (`ring`) the ranks reduce through Lastgood's own ring. docs/checkmate.md.
"""
