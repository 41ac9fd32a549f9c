"""Proof from the graph that each output of a model depends on its own sample alone."""
