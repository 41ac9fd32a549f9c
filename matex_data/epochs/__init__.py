"""Epochs of one rank: windows read ahead in the order of the schedule, and the batches made of them."""
