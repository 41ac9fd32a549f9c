"""Layers whose weights are cut over the ranks of a mesh: rules, and operations that join their results."""
