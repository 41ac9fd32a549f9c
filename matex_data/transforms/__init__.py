"""New samples out of those that a reader delivers, and statistics of them."""
