"""What the slots of a directory hold: layouts, trees, and tensors by name.

`contents` reads them without the model's code; `live_tensors` knows the memory that a training already has for them.
"""
