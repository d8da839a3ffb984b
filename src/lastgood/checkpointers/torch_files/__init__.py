"""Files of torch.save: written durably, and read without running code of theirs."""
