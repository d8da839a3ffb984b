from lastgood.checkpointers.pccheck.options import PCcheckOptions as PCcheckOptions
from lastgood.checkpointers.pccheck.system import PCcheck as PCcheck
from lastgood.checkpointers.pccheck.tuning_file import read_tuning as read_tuning
from lastgood.checkpointers.pccheck.tuning_file import write_tuning as write_tuning
