"""Average of gradients over the ranks: where scripts compute them, and where optimizers apply them."""
