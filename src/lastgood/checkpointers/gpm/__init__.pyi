from lastgood.checkpointers.gpm.system import GPM as GPM
