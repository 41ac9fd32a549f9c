"""Models as graphs of operations, and which rank holds which of their weights."""
