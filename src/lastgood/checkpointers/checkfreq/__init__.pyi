from lastgood.checkpointers.checkfreq.system import CheckFreq as CheckFreq
