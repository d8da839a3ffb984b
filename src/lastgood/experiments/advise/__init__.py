"""Which system and which interval suit a training, from what this machine has measured."""
