"""The figures: what each of them plans, collects and plots, and the order of the complete workflow.

A figure is an entry of one registry: how it is planned, its panels, how it is collected and drawn. A cell is a system
at an interval and a variant with all options resolved, so that figures share records.
"""
