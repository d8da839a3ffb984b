"""The figures: what each of them plans, collects and plots, and the order of the complete workflow."""
