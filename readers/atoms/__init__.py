"""Frames of atoms: trajectories and sets of structures, read by ASE. Neighbours are left to the model."""
