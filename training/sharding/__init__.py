"""This rank's rows of each batch, and the weights of the batches."""
