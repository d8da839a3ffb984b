"""The mirror node: it applies the updates, holds versions, serves them, and says when it is blind."""
