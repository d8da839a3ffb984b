"""Measures the parts of FlowCheck's figure."""
