"""This rank's rows of each batch, and the weight of each batch."""
