from lastgood.checkpointers.dcp.system import TorchDCP as TorchDCP
